"""Which pages are known, where they are, who keeps them, who goes first. Decides; touches no bytes."""
