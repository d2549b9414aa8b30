"""For tests, ours and those of others: a conformance suite, what breaks things on purpose, virtual time."""
