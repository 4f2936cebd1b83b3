"""A run's folder from anybody: what does not fit the recipe is refused, the older checkpoint is used, and nothing outside is touched."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rowstead.records.events import read_events
from rowstead.records.run_folder import RunFolder
from rowstead.run import resume, train
from rowstead.spec.errors import RowsteadError
from rowstead.training.checkpoint import checkpoints_in, load, load_latest, save
from rowstead.training.checkpoint_fits import check_fits
from rowstead.training.trained import evaluate
from tests.small_runs import RecordingCallback, small_spec
from tests.training.crafted import Plain, edit_manifest, edit_shard, seal

SPEC = small_spec(
    "data.synth.num_train_samples=640",
    "train.checkpoint_every=5",
    "train.keep_checkpoints=2",
    "train.dense_optimizer.kind=adagrad",
)
TABLE = "store.sparse_0"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 10 steps with checkpoints of steps 5 and 10."""
    return train(SPEC, out=tmp_path_factory.mktemp("runs") / "run").folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test changes."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def newest(run: Path) -> Path:
    return checkpoints_in(run / "checkpoints")[-1]


def assert_older_is_used(run: Path, *words: str) -> None:
    reported: list[str] = []
    found = load_latest(
        run / "checkpoints", reported.append, check=lambda saved: check_fits(SPEC, saved, pytest.fail, with_optimizer=True)
    )
    assert found.step == 5
    assert len(reported) == 1
    for word in ("step-000000010", *words):
        assert word in reported[0], f"{word!r} not in {reported[0]}"


def fact(*keys: str, value: Any) -> Callable[[Plain], None]:
    def change(manifest: Plain) -> None:
        at = manifest["facts"]
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value

    return change


NAN = float("nan")
FACTS = {
    "no position": (fact("position", value=None), "`facts.position`"),
    "position of another step": (fact("position", "step", value=9), "`facts.position.step`"),
    "position with more keys": (fact("position", "command", value="rm"), "`facts.position.command`"),
    "epoch negative": (fact("position", "epoch", value=-1), "`facts.position.epoch`"),
    "epoch true": (fact("position", "epoch", value=True), "`facts.position.epoch`"),
    "samples NaN": (fact("position", "num_samples", value=NAN), "`facts.position.num_samples`"),
    "seconds NaN": (fact("position", "train_s", value=NAN), "`facts.position.train_s`"),
    "seconds negative": (fact("position", "train_s", value=-1.0), "`facts.position.train_s`"),
    "best NaN": (fact("position", "best", value=NAN), "`facts.position.best`"),
    "best text": (fact("position", "best", value="0.1"), "`facts.position.best`"),
    "evaluations huge": (fact("position", "evaluations_since_best", value=2**63), "`facts.position.evaluations_since_best`"),
    "cursor a number": (fact("position", "cursor", value=3), "`facts.position.cursor`"),
    "cursor negative": (fact("position", "cursor", value={"row": -64}), "`facts.position.cursor`"),
    "cursor of another log": (fact("position", "cursor", value={"window": 0}), "`facts.position.cursor`", "row"),
    "transforms missing": (fact("transforms", value=None), "`facts.transforms`"),
    "transforms of fewer features": (fact("transforms", "scale", value=[1.0]), "`facts.transforms.scale`"),
    "transforms of other features": (fact("transforms", "names", value=["a"] * 4), "`facts.transforms.names`"),
    "transforms with NaN": (fact("transforms", "shift", value=[NAN] * 4), "`facts.transforms.shift`"),
    "transforms beyond 32 bits": (fact("transforms", "fill", value=[1e300] * 4), "`facts.transforms.fill`"),
    "transforms of text": (fact("transforms", "log", value=["no"] * 4), "`facts.transforms.log`"),
    "id kinds a list": (fact("id_kinds", value=[]), "`facts.id_kinds`"),
    "id kinds of other columns": (fact("id_kinds", value={"other": "text"}), "`facts.id_kinds.other`"),
    "id kinds unknown": (fact("id_kinds", value={"sparse_0": "lists"}), "`facts.id_kinds.sparse_0`"),
    "architecture missing": (fact("architecture", value=None), "`facts.architecture`"),
    "architecture of another model": (fact("architecture", "scale", value=2.0), "another model"),
}


@pytest.mark.parametrize("name", FACTS)
def test_facts_that_are_not_well_formed_leave_the_older_checkpoint(run: Path, name: str) -> None:
    change, *words = FACTS[name]
    edit_manifest(newest(run), change)
    assert_older_is_used(run, *words)


def resave(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Replace a checkpoint by one with other tensors, otherwise valid."""
    saved = load(path)
    tensors = dict(saved.tensors)
    change(tensors)
    other = save(path.parent.parent / "other", saved.step, tensors, saved.facts, keep=1)
    shutil.rmtree(path)
    os.rename(other, path)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: tensor})


TENSORS = {
    "rows missing": (lambda tensors: tensors.pop(f"{TABLE}.rows"), f"`{TABLE}.rows` is missing"),
    "rows of fewer": (put(f"{TABLE}.rows", torch.zeros(49, 8)), f"`{TABLE}.rows` has shape (49, 8)"),
    "rows wider": (put(f"{TABLE}.rows", torch.zeros(50, 9)), f"`{TABLE}.rows` has shape (50, 9)"),
    "rows of integers": (put(f"{TABLE}.rows", torch.zeros(50, 8, dtype=torch.int32)), f"`{TABLE}.rows`", "int32"),
    "rows of 16 bits": (put(f"{TABLE}.rows", torch.zeros(50, 8, dtype=torch.float16)), f"`{TABLE}.rows`", "float16"),
    "rows flat": (put(f"{TABLE}.rows", torch.zeros(400)), f"`{TABLE}.rows` has shape (400,)"),
    "state missing": (lambda tensors: tensors.pop(f"{TABLE}.sum"), f"`{TABLE}.sum` is missing"),
    "state wider": (put(f"{TABLE}.sum", torch.zeros(50, 8)), f"`{TABLE}.sum` has shape (50, 8)"),
    "weights missing": (lambda tensors: tensors.pop("net.top.0.weight"), "`net.top.0.weight` is missing"),
    "weights of another shape": (put("net.top.0.bias", torch.zeros(5)), "`net.top.0.bias` has shape (5,)"),
    "weights of integers": (put("net.top.0.bias", torch.zeros(16, dtype=torch.int64)), "int64"),
    "optimizer of no parameter": (put("optimizer.x.sum", torch.zeros(3)), "`optimizer.x.sum`"),
    "optimizer of a later parameter": (put("optimizer.99.sum", torch.zeros(3)), "`optimizer.99.sum`"),
    "optimizer of another kind": (put("optimizer.0.exp_avg", torch.zeros(3)), "`optimizer.0.exp_avg`"),
    "optimizer of another shape": (put("optimizer.0.sum", torch.zeros(3)), "`optimizer.0.sum` has shape (3,)"),
    "optimizer without its steps": (lambda tensors: tensors.pop("optimizer.0.step"), "`optimizer.0.step` is missing"),
    "optimizer of some parameters": (
        lambda tensors: [tensors.pop(name) for name in ("optimizer.1.step", "optimizer.1.sum")],
        "`optimizer.1.sum` is missing",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_the_recipe_does_not_need_leave_the_older_checkpoint(run: Path, name: str) -> None:
    change, *words = TENSORS[name]
    resave(newest(run), change)
    assert_older_is_used(run, *words)


def test_a_resumed_run_and_an_evaluation_use_the_older_checkpoint_and_say_so(run: Path) -> None:
    (run / "record.json").unlink()
    resave(newest(run), put(f"{TABLE}.rows", torch.zeros(50, 9)))
    callback = RecordingCallback()
    evaluate(str(run), callback=callback)
    assert any("trying the previous one" in text for text in callback.messages)
    callback = RecordingCallback()
    result = resume(str(run), callback=callback)
    assert any(f"`{TABLE}.rows` has shape (50, 9)" in text for text in callback.messages)
    assert any("after step 5" in text for text in callback.messages)
    assert result.outcome.position.step == 10


def test_text_from_a_checkpoint_cannot_change_the_terminal(run: Path) -> None:
    escape = "\x1b[2J"

    def rename(header: Plain) -> None:
        header[escape] = header.pop(f"{TABLE}.rows")

    path = newest(run)
    edit_manifest(path, lambda manifest: rename(manifest["tensors"]))
    edit_shard(path, "shard-00000.safetensors", rename)
    edit_manifest(path, fact("position", escape, value=escape))
    reported: list[str] = []
    load_latest(
        run / "checkpoints", reported.append, check=lambda saved: check_fits(SPEC, saved, pytest.fail, with_optimizer=True)
    )
    assert len(reported) == 1
    assert reported[0].isprintable()


# The other files of a run's folder


@pytest.mark.parametrize("name", ["checkpoints", "roles", "events.jsonl", ".lock", "tensorboard", "spec.yaml", "record.json"])
def test_a_link_in_a_runs_folder_is_refused_and_what_it_names_stays_as_it_was(run: Path, tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    if (run / name).exists():
        shutil.move(run / name, precious)
    else:
        precious.mkdir()
        (precious / "file").write_text("mine")
    (run / name).symlink_to(precious)
    before = sorted((path, path.stat().st_mtime_ns) for path in (precious, *precious.rglob("*")))
    for use in (resume, evaluate):
        with pytest.raises(RowsteadError, match=rf"{name}: it is a symbolic link"):
            use(str(run))
    assert sorted((path, path.stat().st_mtime_ns) for path in (precious, *precious.rglob("*"))) == before


def test_a_pipe_deep_in_a_runs_folder_is_refused(run: Path) -> None:
    (run / "roles").mkdir()
    os.mkfifo(run / "roles" / "reader-0.jsonl")
    with pytest.raises(RowsteadError, match=r"roles/reader-0\.jsonl: it is a named pipe"):
        resume(str(run))


SPECS = {
    "huge": (lambda file: os.truncate(file, 1 << 40), "more than"),
    "not UTF-8": (lambda file: file.write_bytes(b"\xff\xfe"), "codec"),
    "nested": (lambda file: file.write_text("[" * 5000 + "]" * 5000), "nested"),
    "a number beyond floats": (
        lambda file: file.write_text(re.sub(r"(?m)^seed: .*$", f"seed: {'9' * 400}", file.read_text())),
        "out of range",
    ),
    "a list": (lambda file: file.write_text("- 1\n"), "mapping"),
    "empty": (lambda file: file.write_text(""), "mapping"),
    "an object of Python": (lambda file: file.write_text("name: !!python/object/apply:os.getpid []\n"), "the tag"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", SPECS)
def test_a_recipe_that_is_none_is_refused_and_named(run: Path, name: str) -> None:
    harm, word = SPECS[name]
    harm(run / "spec.yaml")
    with pytest.raises(RowsteadError, match=r"spec\.yaml") as caught:
        evaluate(str(run))
    assert word in str(caught.value)


RECORDS = {
    "huge": (lambda file: os.truncate(file, 1 << 40), "more than"),
    "a list": (lambda file: file.write_text("[]"), "cannot be read as a record"),
    "figures of text": (lambda file: file.write_text(record_with('{"auc": "high"}')), "cannot be read as a record"),
    "figures NaN": (lambda file: file.write_text(record_with('{"auc": NaN}')), "cannot be read as a record"),
    "figures huge": (lambda file: file.write_text(record_with('{"auc": 1' + "0" * 99 + "}")), "cannot be read as a record"),
    "nested": (lambda file: file.write_text("[" * 100_000), "cannot be read as a record"),
    "a pipe": (lambda file: (file.unlink(), os.mkfifo(file)), "has no record.json"),
}


def record_with(figures: str) -> str:
    return f'{{"kind": "measured", "name": "a", "spec_digest": "b", "date": "c", "figures": {figures}}}'


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_is_none_is_refused_and_named(run: Path, name: str) -> None:
    harm, words = RECORDS[name]
    harm(run / "record.json")
    with pytest.raises(RowsteadError, match=words):
        RunFolder(run).read_record()


def test_events_that_are_none_are_passed_over(run: Path) -> None:
    file = run / "events.jsonl"
    before = read_events(file)
    lines = [
        b"[" * 100_000,
        b"5",
        b'{"kind": "train", "step": true}',
        b'{"kind": "resumed", "step": -5}',
        b'{"kind": 1, "step": 1}',
    ]
    lines += [b'{"kind": "resumed", "step": NaN}', b'{"kind": "resumed", "step": ' + b"9" * 5000 + b"}", b"\xff"]
    with open(file, "ab") as opened:
        opened.write(b"\n".join(lines) + b"\n")
    assert read_events(file) == before
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(RowsteadError, match="a named pipe"):
        read_events(file)


def test_a_manifest_that_is_none_leaves_the_older_checkpoint(run: Path) -> None:
    seal(newest(run), b"null")
    assert_older_is_used(run, "format")
