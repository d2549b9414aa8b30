"""`bench ranks`: what a group of ranks costs its leader, beside the collective that it replaces."""
