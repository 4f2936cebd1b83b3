"""Servers in the ways in which they can serve: with one thread, with several, with keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rowstead.fleet.keys import Keys
from rowstead.fleet.server import Server
from tests.fleet.counting import Counter
from tests.fleet.echo_server import echo


@pytest.fixture(params=[(1, False), (3, False), (1, True)], ids=["one thread", "threads", "keys"])
def setting(request: pytest.FixtureRequest) -> dict[str, Any]:
    threads, has_keys = request.param
    return {"threads": threads, "keys": Keys.make() if has_keys else None}


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture
def server(setting: dict[str, Any], counter: Counter) -> Iterator[Server]:
    with Server({"echo": echo, "count": counter}, **setting).start() as server:
        yield server
