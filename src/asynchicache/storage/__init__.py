"""The storage engine protocol, and the guard that wraps every engine."""
