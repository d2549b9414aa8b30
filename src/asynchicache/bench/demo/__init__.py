"""`demo`: the same conversations served four ways, and a report."""
