"""Models of transformers that resume from the cache, alone or many requests at once."""
