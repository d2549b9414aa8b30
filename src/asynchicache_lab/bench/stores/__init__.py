"""`bench stores`: what a store has to carry for many nodes."""
