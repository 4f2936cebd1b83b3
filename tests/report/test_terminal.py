"""Text is printed verbatim."""

from __future__ import annotations

import io

import pytest
from rich.table import Table

from rowstead.report.terminal import terminal


@pytest.mark.parametrize("text", ["a:x:b", "[red]a[/red]", "a [link=x] b", "[/nothing]", ":smile: [bold]"])
def test_nothing_in_a_text_is_an_emoji_or_markup(text: str) -> None:
    file = io.StringIO()
    console = terminal(file=file, width=80)
    table = Table(text, title=text)
    table.add_row(text)
    console.print(text)
    console.print(table)
    assert file.getvalue().count(text) == 4
