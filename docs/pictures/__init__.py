"""The pictures of the documentation, and what draws them."""
