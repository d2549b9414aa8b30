"""Device and host memory: sizes, pinning, and slot allocation."""
