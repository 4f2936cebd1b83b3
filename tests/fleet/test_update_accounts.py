"""What servers say was done and lost is asked until they say it, and what they cannot know any more is known here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from rowstead.fleet.rpc_client import ServerUnavailable
from rowstead.fleet.update_accounts import Accounts
from rowstead.fleet.wire import Message
from rowstead.training.progress import Position


@dataclass
class Post:
    kind: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number}"


class Crew:
    """Servers that answer what they are told to, one after another; an exception is one that is away."""

    def __init__(self, **answers: list[dict[str, Any] | Exception]) -> None:
        self._answers = {name.replace("_", "-"): list(said) for name, said in answers.items()}
        self.posts = [Post(*_parts(name)) for name in self._answers]
        self.num_looks = 0

    def of(self, *kinds: str) -> list[Post]:
        return [post for post in self.posts if post.kind in kinds]

    def look(self) -> None:
        self.num_looks += 1

    def call(self, post: Post, kind: str, *, deadline_s: float) -> Message:
        said = self._answers[post.name].pop(0)
        if isinstance(said, Exception):
            raise said
        return Message(kind, dict(said))


def _parts(name: str) -> tuple[str, int]:
    kind, _, number = name.partition("-")
    return kind, int(number)


def reader(num_done: int, num_batches: int) -> dict[str, Any]:
    return {
        "num_done": num_done,
        "num_batches": num_batches,
        "num_samples": 10 * num_batches,
        "epoch": 1,
        "num_batches_repeated": 0,
    }


def sparse(num_updates: int, num_lost: int) -> dict[str, Any]:
    return {"num_updates": num_updates, "num_lost_updates": num_lost}


def accounts_of(crew: Crew, position: Position) -> Accounts:
    return Accounts(crew, position, pytest.fail)  # type: ignore[arg-type]


def test_a_reader_that_is_just_coming_back_is_counted_too() -> None:
    crew = Crew(reader_0=[ServerUnavailable("away"), reader(40, 40)], reader_1=[reader(39, 40)], sparse_0=[sparse(79, 0)])
    position = Position()
    accounts_of(crew, position).settle()
    assert (position.step, position.num_samples) == (79, 790)
    assert crew.num_looks >= 3, "the roles are looked after meanwhile"


def test_updates_that_a_server_loses_when_nobody_sends_any_more_are_counted() -> None:
    crew = Crew(sparse_0=[sparse(100, 3), sparse(60, 2)], sparse_1=[sparse(100, 0)] * 2, reader_0=[reader(100, 100)] * 2)
    accounts = accounts_of(crew, Position())
    accounts.settle()
    statuses = accounts.last()  # the first was killed meanwhile and has come back from an old snapshot
    assert {name: status["num_lost_updates"] for name, status in statuses.items() if name.startswith("sparse")} == {
        "sparse-0": 43,
        "sparse-1": 0,
    }
