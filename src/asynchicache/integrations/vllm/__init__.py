"""Storage backends of this package as a secondary tier of vLLM."""
