"""Storage backends of ours below SGLang's HiCache."""
