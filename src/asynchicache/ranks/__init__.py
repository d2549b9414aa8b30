"""Several ranks, one cache: a leader decides, followers carry out its log."""
