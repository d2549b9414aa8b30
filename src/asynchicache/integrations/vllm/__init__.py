"""Storage backends of ours as a secondary tier of vLLM."""
