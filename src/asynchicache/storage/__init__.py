"""The protocol of storage engines, and what the core wraps around every one of them."""
