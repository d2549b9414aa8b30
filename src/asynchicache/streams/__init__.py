"""Streams and events of CUDA, an emulation of them, and the way back to the event loop."""
