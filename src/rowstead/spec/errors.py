"""What a user can get wrong, as exceptions whose text says what, where and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RowsteadError(ValueError):
    """A mistake in what we were given; the command line prints its text and no traceback."""


class SpecError(RowsteadError):
    """A recipe that cannot be right. `path` is the dotted key, filled in as the error rises."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}" if path else problem)

    def within(self, outer: str) -> SpecError:
        """The same error seen from one level further out."""
        joined = f"{outer}.{self.path}" if self.path else outer
        return SpecError(joined.replace(".[", "["), self.problem)


class DataError(RowsteadError):
    """A log that cannot be read as the recipe says."""


class CheckpointError(RowsteadError):
    """A saved model that is missing, damaged, or of another shape."""


class TrainingError(RowsteadError):
    """A run that cannot go on, such as one whose loss is no longer finite."""


class LostProcessError(RowsteadError):
    """Another process of the job has gone; whoever started it knows why."""


def require(condition: bool, field: str, problem: str) -> None:
    """Raise a SpecError about `field` unless `condition` holds."""
    if not condition:
        raise SpecError(field, problem)


RENAMED = {"by_hand": "manual"}
"""Names of earlier versions, and their names now."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence that names the nearest known word, or lists the known ones when none is near."""
    names = list(known)
    if RENAMED.get(word) in names:
        return f"`{word}` is now called `{RENAMED[word]}`"
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean `{near[0]}`?"
    shown = ", ".join(f"`{name}`" for name in names[:20])
    return f"known here: {shown}{' …' if len(names) > 20 else ''}" if names else "nothing is known here"
