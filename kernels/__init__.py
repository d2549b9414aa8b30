"""Page gather and scatter; a torch reference beside every Triton kernel."""

if __name__ != "asynchicache.kernels":
    raise ImportError("import this folder as asynchicache.kernels, not as kernels")
