"""`make gpu`: what a machine with an NVIDIA GPU does with the library, in parts of under ten minutes."""
