"""Storage engines. `asynchicache.config` finds them by entry point, each imported on first use."""

if __name__ != "asynchicache.backends":
    raise ImportError("import this folder as asynchicache.backends, not as backends")
