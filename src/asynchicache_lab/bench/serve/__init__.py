"""`bench serve`: conversations with servers over HTTP; one of them loses its storage."""
