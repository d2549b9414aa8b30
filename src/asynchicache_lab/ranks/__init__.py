"""Groups of ranks in one process: chaos, and its oracles."""
