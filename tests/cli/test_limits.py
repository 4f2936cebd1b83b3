"""Where files, memory or threads run out, a command says so in a sentence, with the limit to raise."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rowstead.records.limits import explain_limit, require_open_files
from rowstead.records.usage import free_host_bytes
from rowstead.spec.errors import RowsteadError
from tests.small_runs import recipe

PROGRAM = (
    "import resource, sys; what, most = sys.argv.pop(1), int(sys.argv.pop(1)); "
    "resource.setrlimit(getattr(resource, what), (most, most)); from rowstead.cli.main import command; command()"
)


def run_under(limit: str, most: int, folder: Path, *arguments: object) -> str:
    """What a command that must fail says under a limit."""
    words = [sys.executable, "-c", PROGRAM, limit, str(most), *map(str, arguments)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not list(folder.glob("runs/*"))
    return done.stderr


@pytest.mark.slow
def test_a_fleet_that_may_open_too_few_files_says_how_many_it_needs(tmp_path: Path) -> None:
    roles = "trainers=2,sparse=1,dense=1,readers=1"
    said = run_under("RLIMIT_NOFILE", 40, tmp_path, "train", recipe(tmp_path), "--fleet", roles)
    assert said == (
        "error: a fleet of 5 roles needs 92 open files, and this process may have 40: raise the limit with `ulimit -n 92`\n"
    )


@pytest.mark.slow
def test_processes_that_may_open_too_few_files_say_so(tmp_path: Path) -> None:
    said = run_under("RLIMIT_NOFILE", 10, tmp_path, "train", recipe(tmp_path), "--processes", 3)
    assert said.startswith("error: too many open files: this process may have 10. Raise the limit with `ulimit -n 4096`")


def test_too_little_memory_for_torch_is_said_before_it_is_imported(tmp_path: Path) -> None:
    said = run_under("RLIMIT_AS", 10**9, tmp_path, "train", recipe(tmp_path))
    assert said.startswith(
        "error: this process may use 1.0 GB of memory (`ulimit -v`), and training needs 1.4 GB before it has any table"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["features.sparse.0.num_rows=100_000_000"], "error: no placement fits: 3 tables"),
        (["model.top=[100000, 100000]"], "error: out of memory while allocating 40.0 GB. 1. make the model smaller"),
    ],
)
def test_what_does_not_fit_into_the_memory_of_the_process_is_named(tmp_path: Path, changes: list[str], says: str) -> None:
    settings = [word for change in changes for word in ("--set", change)]
    said = run_under("RLIMIT_AS", 3 * 10**9, tmp_path, "train", recipe(tmp_path), *settings)
    assert said.startswith(says)


def test_free_memory_is_within_the_limit_of_the_process() -> None:
    program = "import resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 29, 3 << 29)); "
    program += "from rowstead.records.usage import free_host_bytes; print(free_host_bytes())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < min(3 << 29, free_host_bytes() + (1 << 29))


def test_a_soft_limit_on_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        require_open_files(128, "this test")
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (128, hard)
        with pytest.raises(RowsteadError, match="this test needs"):
            require_open_files(hard + 1, "this test")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "out of memory. 1."),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 2000000000 bytes."), "allocating 2.0 GB"),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"), "out of memory while allocating 20.00 GiB"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (ValueError("something else"), None),
    ],
)  # fmt: skip
def test_errors_of_the_system_are_told_apart(error: Exception, says: str | None) -> None:
    wrapped = RuntimeError("while training")
    wrapped.__cause__ = error
    for one in (error, wrapped):
        reason = explain_limit(one)
        assert reason is None if says is None else says in (reason or "")
