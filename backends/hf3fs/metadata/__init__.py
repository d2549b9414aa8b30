"""The service that knows which page lies in which slot of which file of 3FS."""
