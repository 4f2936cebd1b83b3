"""The folder of one run: what is in it, how it is named and found, and who may write to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from rowstead.records.files import is_record, json_line, write_atomic
from rowstead.records.plain_files import check_plain_folder, open_plain, parse_json, read_plain
from rowstead.spec.errors import RowsteadError, SpecError, did_you_mean
from rowstead.spec.parse import override, parse, to_plain
from rowstead.spec.record import Record, date_now
from rowstead.spec.run import RunSpec
from rowstead.spec.yaml_text import read_text

DEFAULT_ROOT = "runs"
"""Default folder of runs."""
MAX_SPEC_BYTES = 16 << 20
BEST = "best"
"""The checkpoint of the best evaluation, in a run's folder."""
MAX_FAILURE_BYTES = 1 << 20
LAST = "last"
"""Stands for the run that was trained most recently."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a run failed, and when."""

    date: str
    step: int
    """Steps it had trained."""
    why: str


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run's files, and the few that are read and written here.

    One process trains into a folder, and holds `lock` while it does; any number may read. Every file but the
    event files is replaced as a whole, so a reader never sees half of one.
    """

    path: Path
    checkpoints_name: str = "checkpoints"
    """`best` to use the checkpoint of the best evaluation instead of the newest one."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def spec_file(self) -> Path:
        """The resolved recipe; a folder that has it is a run."""
        return self.path / "spec.yaml"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / self.checkpoints_name

    @property
    def is_best(self) -> bool:
        return self.checkpoints_name == BEST

    @property
    def record_file(self) -> Path:
        """The result of the run; absent until it has finished."""
        return self.path / "record.json"

    @property
    def failure_file(self) -> Path:
        """Why the run failed, as a Failure; absent if it did not, or was resumed since."""
        return self.path / "failure.json"

    @property
    def predicted_file(self) -> Path:
        """The prediction for the run, as a Record; absent if the machine was not calibrated."""
        return self.path / "predicted.json"

    @classmethod
    def create(cls, root: Path | str, name: str) -> RunFolder:
        """Create `root/name-001`, or the next free number."""
        root = Path(root)
        with _folder_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            number = max((_number(path.name, name) for path in root.iterdir()), default=0)
            while True:
                number += 1
                path = root / f"{name}-{number:03d}"
                with contextlib.suppress(FileExistsError):  # created by another process: try the next number
                    path.mkdir()
                    return cls(path)

    @classmethod
    def create_at(cls, path: Path | str) -> RunFolder:
        """Create the folder that the user named, which must be new or empty."""
        path = Path(path)
        with _folder_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        cls.check_free(path)
        return cls(path)

    @classmethod
    def check_free(cls, path: Path | str) -> None:
        """Raise an error if a new run cannot use this path."""
        path = Path(path)
        with _folder_errors(path):
            if not path.exists() or not any(path.iterdir()):
                return
        if cls(path).spec_file.is_file():
            raise RowsteadError(f"{path} already holds a run: choose another --out, or continue it with --resume {path}")
        raise RowsteadError(f"{path} exists and is not empty: choose another --out")

    @classmethod
    def open(cls, path_or_name: Path | str, root: Path | str) -> RunFolder:
        """The run at a path, or of that name under `root`, or with `last` the run trained most recently; `RUN/best` is its best checkpoint.

        A run's folder may come from anybody: one with links in it is refused, since training would write through them.
        """
        root, text = Path(root), str(path_or_name)
        runs = runs_in(root)
        if text == LAST:
            if not runs:
                raise RowsteadError(f"there is no run under {root} yet: run `rowstead train` first")
            check_plain_folder(runs[-1].path)
            return runs[-1]
        if Path(text).name == BEST and str(Path(text).parent) != "." and not cls(Path(text)).spec_file.is_file():
            run = cls.open(Path(text).parent, root)
            if not run.path.joinpath(BEST).is_dir():
                raise RowsteadError(
                    f"{run.path} has no best evaluation: only runs with train.early_stop keep one. Use {run.path}"
                )
            return cls(run.path, BEST)
        for candidate in (cls(root / text), cls(Path(text))):
            if candidate.spec_file.is_file():
                check_plain_folder(candidate.path)
                return candidate
        if Path(text).is_dir():
            raise RowsteadError(f"{text} is not the folder of a run: it has no spec.yaml")
        if not runs:
            raise RowsteadError(f"no run `{text}`, and no other under {root} either: run `rowstead train` first")
        known = [run.name for run in reversed(runs)]
        raise RowsteadError(f"no run `{text}` under {root}: {did_you_mean(text, [*known, LAST])}")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder for training, or raise an error if another process holds the lock. It ends with its process.

        What a killed process has left half written or half deleted among the checkpoints is removed.
        """
        file = self.path / ".lock"
        with _folder_errors(file):
            descriptor = open_plain(file, os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(descriptor, 32).decode(errors="replace").strip()
                whom = f"process {holder}" if holder else "another process"
                raise RowsteadError(
                    f"{self.path} is being trained by {whom}: wait for it or stop it, or choose another --out"
                ) from None
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())  # for the message above
            for leftover in (*self.path.glob("checkpoints/.tmp-*"), *self.path.glob(f"{BEST}/.tmp-*")):
                shutil.rmtree(leftover, ignore_errors=True)
            yield
        finally:
            os.close(descriptor)

    def write_spec(self, spec: RunSpec) -> None:
        """Write the resolved recipe."""
        text = yaml.safe_dump(to_plain(spec), sort_keys=False, allow_unicode=True, width=120)
        with _folder_errors(self.spec_file):
            write_atomic(self.spec_file, text)

    def read_spec(self, overrides: Iterable[str] = ()) -> RunSpec:
        """The recipe of this run as it was started or last resumed, with `key.path=value` overrides applied."""
        try:
            text = read_plain(self.spec_file, MAX_SPEC_BYTES).decode()
            return parse(RunSpec, override(read_text(text, what=str(self.spec_file)), overrides))
        except OSError as error:
            raise SpecError("", f"cannot read {self.spec_file}: {error.strerror or error}") from None
        except (RecursionError, ArithmeticError) as error:
            raise SpecError("", f"{self.spec_file}: it is nested too deeply, or has a number too large: {error}") from None
        except ValueError as error:
            raise SpecError("", f"{self.spec_file}: {error}") from None

    def write_record(self, record: Record) -> None:
        """Write the result of the run."""
        with _folder_errors(self.record_file):
            write_atomic(self.record_file, json_line(to_plain(record)))

    def write_failure(self, failure: Failure) -> None:
        """Keep why the run failed. A disk that is full, as it may be then, is no second error."""
        with contextlib.suppress(OSError):
            write_atomic(self.failure_file, json_line(to_plain(failure)))

    @contextlib.contextmanager
    def keep_failure(self, step: Callable[[], int], *, keeps_empty: bool) -> Iterator[None]:
        """Keep why the block fails, after how many steps; a run that fails before its first step is removed unless `keeps_empty`."""
        try:
            yield
        except Exception as error:
            if step() == 0 and not keeps_empty:
                shutil.rmtree(self.path, ignore_errors=True)
            else:
                self.write_failure(Failure(date=date_now(), step=step(), why=str(error) or type(error).__name__))
            raise
        with contextlib.suppress(OSError):
            self.failure_file.unlink(missing_ok=True)

    def read_failure(self) -> Failure | None:
        """Why the run failed; None if it did not."""
        try:
            plain = parse_json(read_plain(self.failure_file, MAX_FAILURE_BYTES))
            return Failure(date=str(plain["date"]), step=int(plain["step"]), why=str(plain["why"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @property
    def is_training(self) -> bool:
        """Whether a process trains into it now."""
        try:
            descriptor = open_plain(self.path / ".lock", os.O_RDWR)
        except OSError:
            return False
        try:
            os.kill(int(os.read(descriptor, 32)), 0)  # a process that has gone holds no lock
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except (OSError, ValueError):
            return False
        finally:
            os.close(descriptor)
        return False

    def read_record(self) -> Record:
        """The result of the run, once it has finished."""
        if not self.record_file.is_file():
            raise RowsteadError(
                f"{self.path} has no record.json: the run has not finished; continue it with --resume {self.path}"
            )
        with _folder_errors(self.record_file):
            content = read_plain(self.record_file)
        try:
            plain = parse_json(content)
            if not is_record(plain):
                raise ValueError("a field is missing or not of its type")
            return Record(**plain)
        except (ValueError, TypeError) as error:
            raise RowsteadError(
                f"{self.record_file} cannot be read as a record: {error}. Remove it, and continue the run with --resume {self.path}"
            ) from None


def runs_in(root: Path | str) -> list[RunFolder]:
    """The runs under a root, the one trained most recently last."""
    root = Path(root)
    if not root.is_dir():
        return []
    found = [RunFolder(path) for path in root.iterdir() if (path / "spec.yaml").is_file()]
    return sorted(found, key=lambda run: (_last_written_s(run), run.name))


def _last_written_s(run: RunFolder) -> float:
    times = [0.0]
    for file in (run.spec_file, run.events_file):
        with contextlib.suppress(OSError):
            times.append(file.stat().st_mtime)
    return max(times)


def _number(folder: str, name: str) -> int:
    """3 for `name-003`, and 0 for a folder of another name."""
    digits = folder[len(name) + 1 :]
    return int(digits) if folder.startswith(f"{name}-") and digits.isascii() and digits.isdigit() else 0


@contextlib.contextmanager
def _folder_errors(path: Path) -> Iterator[None]:
    """Turn an OSError, such as a full disk, into an error without a traceback."""
    try:
        yield
    except OSError as error:
        raise RowsteadError(f"cannot use {path}: {error.strerror or error}") from error
