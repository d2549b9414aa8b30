"""Adapters for serving engines, and exporters of metrics, traces and events."""
