"""`--processes` starts each process with all the options that the command was given."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from rowstead.cli.app import _given_words, app


def train_command() -> Any:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return group.commands["train"]


def parsed(words: list[str]) -> dict[str, Any]:
    with train_command().make_context("train", list(words)) as context:
        return dict(context.params)


def a_word_for_each_parameter() -> list[str]:
    words = []
    for parameter in train_command().params:
        if parameter.name in ("processes", "help"):
            continue
        if parameter.param_type_name == "argument":
            words.append("mine.yaml")
        elif getattr(parameter, "is_flag", False):
            words.append(parameter.opts[0])
        else:
            words += [parameter.opts[0], "seed=3"] * (2 if parameter.multiple else 1)
    return words


def test_every_option_of_train_reaches_the_processes() -> None:
    words = a_word_for_each_parameter()
    with train_command().make_context("train", [*words, "--processes", "2"]) as context:
        passed_on = _given_words(context, without="processes")
    assert "--processes" not in passed_on
    assert parsed(passed_on) == parsed(words)
    unset = parsed([])
    assert {name for name, value in parsed(passed_on).items() if value == unset[name]} == {"processes"}


def test_no_options_are_no_words_but_the_defaults() -> None:
    with train_command().make_context("train", ["--processes", "2"]) as context:
        assert parsed(_given_words(context, without="processes")) == parsed([])
