"""Serving engines on the cache, and what operators and routers read of it."""
