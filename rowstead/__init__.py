"""rowstead trains deep learning recommendation models. Every embedding row has a home."""

__version__ = "0.1.0"
