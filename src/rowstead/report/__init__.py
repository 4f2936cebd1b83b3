"""Figures, drawn from numbers that other rooms computed. No torch here."""
