"""Streams and events of CUDA, an emulation of them, and how their completion reaches the event loop."""
