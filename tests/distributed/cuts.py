"""Ways to cut a table into pieces."""

from __future__ import annotations

from hypothesis import strategies as st

Cut = tuple[int, int, int, int]
"""First and last row, first and last column."""


@st.composite
def cuts(draw: st.DrawFn, num_rows: int, width: int, most: int = 6) -> list[Cut]:
    """Pieces that together are a table, each cut from a larger one along its rows or columns; in any order."""
    pieces: list[Cut] = [(0, num_rows, 0, width)]
    for _ in range(draw(st.integers(0, most - 1))):
        place = draw(st.integers(0, len(pieces) - 1))
        a, b, c, d = pieces.pop(place)
        if draw(st.booleans()):
            middle = draw(st.integers(a, b))
            pieces += [(a, middle, c, d), (middle, b, c, d)]
        else:
            middle = draw(st.integers(c, d))
            pieces += [(a, b, c, middle), (a, b, middle, d)]
    return draw(st.permutations(pieces))
