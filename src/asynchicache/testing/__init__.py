"""Test tools, also for other projects: a conformance suite, fault injection, virtual time."""
