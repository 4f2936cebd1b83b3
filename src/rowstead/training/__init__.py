"""The training step, the loop around it, evaluation and checkpoints."""
