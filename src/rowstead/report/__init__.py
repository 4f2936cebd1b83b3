"""Charts and pages of results computed elsewhere. Does not import torch."""
