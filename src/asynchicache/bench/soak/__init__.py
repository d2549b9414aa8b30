"""`soak`: the whole cache at its highest rate, for as long as one likes."""
