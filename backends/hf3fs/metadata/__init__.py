"""Names of pages, and the slots of files that they have: in SQLite, or in Redis."""
