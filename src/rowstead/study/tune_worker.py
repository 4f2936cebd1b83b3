"""A worker process of a search: `python -m rowstead.study.tune_worker ROOT STUDY NUMBER`.

It exits as soon as its standard input ends, that is when its parent has exited.
"""

from __future__ import annotations

import os
import sys
import threading

from rowstead.records.store import RunStore


def main(root: str, study: str, number: str) -> None:
    """Try settings until the budget is spent."""
    threading.Thread(target=_end_with_input, name="end with input", daemon=True).start()
    from rowstead.study.search import Search, read_spec

    Search(read_spec(RunStore(root).study_folder(study)), root, worker=int(number)).run()


def _end_with_input() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
