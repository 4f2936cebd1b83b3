"""Roles of a fleet: what they say to each other, what they keep, and how they are started and watched."""
