"""Commands, flags, tables and JSON."""
