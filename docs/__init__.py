"""The documentation, and what writes the generated pages of it."""
