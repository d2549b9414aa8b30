"""Storage backends of this package for SGLang's HiCache."""
