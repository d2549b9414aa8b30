"""Storage engines. `asynchicache.config` finds them by entry point and imports each on first use."""

if __name__ != "asynchicache.backends":
    raise ImportError("import this folder as asynchicache.backends, not as backends")
