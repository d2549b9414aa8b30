"""`bench serve`: conversations with servers over HTTP, one of which loses its storage."""
