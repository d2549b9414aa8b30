"""The decisions of the cache, as pure code without event loop, threads or device memory."""
