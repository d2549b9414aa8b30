"""One suite for caches of language models, over HTTP and by faults, whoever wrote the cache."""
