"""`rowstead report` and `rowstead ui`: charts of runs and predictions, and the what-if page. Needs no torch."""

from __future__ import annotations

import signal
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from rowstead.cli.options import RUNS, Root
from rowstead.report.terminal import count, terminal
from rowstead.spec.errors import RowsteadError


def report(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUNS]", help="Runs, folders of runs, or files of records. [default: all under --runs]"),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="HTML file to write.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option("--title", help="Heading of the page.")] = None,
    pictures: Annotated[
        Path | None,
        typer.Option("--pictures", metavar="FOLDER", help="Also write each chart as a file into this folder."),
    ] = None,
    as_: Annotated[str, typer.Option("--as", metavar="svg|png", help="Format of those files.")] = "svg",
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    runs: Root = RUNS,
) -> None:
    """Write runs, sweeps, searches and predictions as one self-contained HTML page."""
    from rowstead.records.files import write_atomic
    from rowstead.report.inputs import gather
    from rowstead.report.page import charts_of, page_from
    from rowstead.spec.sizes import format_bytes

    if as_ not in ("svg", "png"):
        raise RowsteadError(f"--as is `svg` or `png`, got `{as_}`")
    console = terminal()
    inputs = gather(what or [runs], root=runs)
    text = page_from(inputs, title=title)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, text)
    except OSError as error:
        raise RowsteadError(f"cannot write {out}: {error.strerror or error}") from None
    bad = inputs.contents.num_bad_lines
    note = f" ({bad:,} line{'s' if bad > 1 else ''} could not be read)" if bad else ""
    console.print(
        f"report of {count(len(inputs.entries), 'record')} in {out}, {format_bytes(len(text.encode()))}{note}",
        soft_wrap=True,
    )
    if pictures is not None:
        from rowstead.report.pictures import write_pictures

        files = write_pictures(charts_of(inputs), pictures, kind="png" if as_ == "png" else "svg")
        console.print(f"{len(files)} charts in {pictures}", soft_wrap=True)
    if open_:
        webbrowser.open(out.resolve().as_uri())


def ui(
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; one that is not loopback requires the printed token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 for any free port.")] = 8642,
    token: Annotated[
        bool, typer.Option("--token", help="Require a token on loopback as well; the page is then not opened.")
    ] = False,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    runs: Root = RUNS,
) -> None:
    """Serve the what-if page: sliders for model and fleet, with predictions for every platform."""
    from rowstead.distributed.stop import stop_signals
    from rowstead.ui.server import Ui, new_token

    ended = threading.Event()
    for number in stop_signals():
        signal.signal(number, lambda *_: ended.set())
    page = Ui(host=host, port=port, runs=runs, token=new_token() if token else None)
    page.start()
    page.workers.start()  # so that the first answer is as quick as the others
    console = terminal()
    console.print(f"open {page.address}", soft_wrap=True)
    console.print("stop with Ctrl-C")
    if open_ and not token:  # all users of a machine see the command lines of browsers, and so the token
        webbrowser.open(page.address)
    ended.wait()
    page.close()
