"""`bench storage`: each engine beside the plainest client of the same medium."""
