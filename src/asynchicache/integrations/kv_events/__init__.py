"""Publish and follow page events over ZeroMQ, in the format of the engines' KV events."""
