"""The small protocols that the rooms share."""
