"""What becomes of a request: planned here without bytes, and carried out by copies and tasks."""
