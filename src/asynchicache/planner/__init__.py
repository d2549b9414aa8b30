"""What the cache decides, as pure code without event loop, threads or device memory."""
