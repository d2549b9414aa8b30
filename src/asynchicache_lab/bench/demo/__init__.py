"""`demo`: serve the same conversations in four modes, and write a report."""
