"""Errors of users, with a text that says what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from pathlib import Path


class RowsteadError(ValueError):
    """An error in the input; the command line prints its text without a traceback."""


class SpecError(RowsteadError):
    """An invalid recipe. `path` is the dotted key, completed as the error propagates."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{shorten(path, 200)}: {problem}" if path else problem)

    def within(self, outer: str) -> SpecError:
        """The same error with its path extended by an outer key."""
        joined = f"{outer}.{self.path}" if self.path else outer
        return SpecError(joined.replace(".[", "["), self.problem)


class DataError(RowsteadError):
    """A log that does not match the recipe."""


class CheckpointError(RowsteadError):
    """A saved model that is missing, damaged, or of another shape."""


class TrainingError(RowsteadError):
    """A run that cannot continue, such as one whose loss is no longer finite."""


class LostProcessError(RowsteadError):
    """Another process of the job has ended; its launcher reports why."""


def shorten(text: str, most: int = 60) -> str:
    """The beginning of a text that is too long to be shown."""
    return text if len(text) <= most else text[: most - 1] + "…"


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
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6) if len(word) <= 200 else []
    if near:
        return f"did you mean `{near[0]}`?"
    shown = ", ".join(f"`{shorten(name)}`" for name in names[:20])
    return f"known here: {shown}{' …' if len(names) > 20 else ''}" if names else "nothing is known here"


def install_command(extra: str) -> str:
    """The command that installs an extra of this package: by name, or in the clone that it runs from."""
    clone = Path(__file__).resolve().parents[3]
    if not (clone / "src" / "rowstead").is_dir() or not (clone / "pyproject.toml").is_file():
        return f"pip install 'rowstead[{extra}]'"
    where = "." if clone == Path.cwd() else str(clone)
    return f"pip install -e {shlex.quote(f'{where}[{extra}]')}"
