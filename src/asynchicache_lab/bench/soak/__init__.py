"""`soak`: run the whole cache at its highest rate for a given time."""
