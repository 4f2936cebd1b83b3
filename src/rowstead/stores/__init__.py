"""Where embedding rows live."""
