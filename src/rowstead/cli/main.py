"""The entry of the command line: runs a command, and prints what ends it early without a traceback.

Everything else is imported once Ctrl-C is handled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

from rowstead.records.limits import explain_limit
from rowstead.spec.errors import LostProcessError, RowsteadError

INTERRUPTED = "interrupted: progress since the last checkpoint is lost"


def command() -> None:
    """The console script: `main`, without a traceback for a Ctrl-C during imports and exit."""
    report_unraisable, report_thread = sys.unraisablehook, threading.excepthook

    def unraisable(args: sys.UnraisableHookArgs) -> None:
        if not _Interrupted.was_raised:
            report_unraisable(args)
        elif args.exc_type is _Interrupted:  # it came within a callback or a destructor, and would be lost
            again = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
            again.daemon = True
            again.start()

    sys.unraisablehook = unraisable
    threading.excepthook = lambda args: None if _Interrupted.was_raised else report_thread(args)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # before and after `main`, which has a handler of its own
    try:
        main()
    except SystemExit as ending:
        # Of a stopped command, threads may still compile or train: shutting the interpreter down around them can crash it.
        if isinstance(ending.code, int) and ending.code > 128:
            _end(ending.code)
        raise


def main() -> None:
    """Run the command line; a user's mistake prints an error without a traceback."""
    try:
        with _interrupts():
            from rowstead.cli.app import app

            app(standalone_mode=True)
    except LostProcessError as error:
        from rowstead.distributed.launch import LOST

        _fail(str(error), code=LOST)
    except RowsteadError as error:
        _fail(str(error))
    except _Interrupted:
        _fail(INTERRUPTED, code=128 + signal.SIGINT)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        if _Interrupted.was_raised:  # what was interrupted has made another error of it
            _fail(INTERRUPTED, code=128 + signal.SIGINT)
        if (reason := explain_limit(error)) is not None:
            _fail(reason)
        if isinstance(error, OSError):
            _fail(f"{error.filename or 'the system'}: {error.strerror or error}")
        raise


class _Interrupted(BaseException):
    """Ctrl-C that no command handles; Typer would exit silently."""

    was_raised = False


@contextlib.contextmanager
def _interrupts() -> Iterator[None]:
    """Turn Ctrl-C into `_Interrupted`; the training loop has its own handler."""

    def interrupt(number: int, frame: object) -> NoReturn:
        _Interrupted.was_raised = True
        raise _Interrupted

    _Interrupted.was_raised = False
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _fail(text: str, code: int = 2) -> NoReturn:
    from rowstead.distributed import launch
    from rowstead.report.terminal import terminal
    from rowstead.spec.job import is_multi_process

    if launch.is_launched():
        launch.write_reason(f"error: {text}")
        _end(code)
    if (rank := os.environ.get("RANK", "0")) != "0":
        text = f"{text} (process {rank})"
    terminal(stderr=True).print(f"error: {text}", style="bold red", soft_wrap=True)
    if is_multi_process():
        _end(code)
    sys.exit(code)


def _end(code: int) -> NoReturn:
    """Exit at once: a failed process of a job has collectives pending that will never complete."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
