"""What becomes of pages, told over ZeroMQ in the form of the engines' KV events, and followed."""
