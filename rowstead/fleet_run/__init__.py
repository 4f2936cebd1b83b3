"""One run of a fleet: the head, the trainer and the other roles as they are wired from a spec."""
