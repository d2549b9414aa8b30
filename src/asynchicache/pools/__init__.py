"""Memory of device and host: sizes, pinning, and who has which slot."""
