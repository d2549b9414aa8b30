"""The laboratory: benches, soaks and searches by seed. A checkout has it; the wheel does not."""
