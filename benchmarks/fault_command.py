"""The command of a disturbed run in a fork of the bench, which saves the time that imports take."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import time
from pathlib import Path

POLL_INTERVAL_S = 0.02


class ForkedCommand:
    """The command in a fork of this process, which has imported what it needs: as `subprocess.Popen`, with less processor time."""

    def __init__(self, arguments: list[str], log: Path, environment: dict[str, str]) -> None:
        import torch._dynamo  # noqa: F401, RUF100 - the optimizers do, and it takes a second

        from rowstead.cli import app, fleet, main  # noqa: F401, RUF100
        from rowstead.fleet import coordinator  # noqa: F401, RUF100
        from rowstead.run import train  # noqa: F401, RUF100

        sys.stdout.flush()
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            atexit._clear()  # or this fork would remove our temporary folders
            os.setsid()
            os.closerange(3, 4096)  # connections of `Links`: a copy would keep them open when they are cut
            printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for standard in (1, 2):
                os.dup2(printed, standard)
            os.environ.clear()
            os.environ.update(environment)
            tempfile.tempdir = None
            sys.argv = ["rowstead", *arguments]
            main.command()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(POLL_INTERVAL_S)
        return code
