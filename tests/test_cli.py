"""The command line: what a user gets wrong is named with what to do about it, never with a traceback."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from rowstead import cli, run
from rowstead.data.synth import write_parquet
from rowstead.spec.parse import override, to_plain
from tests.small_runs import parquet_spec, small_plain, small_spec

Change = Callable[[pa.Table], pa.Table]


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


Command = Callable[..., Done]


@pytest.fixture
def rowstead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs a command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["rowstead", *arguments])
        capfd.readouterr()
        code: Any = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        output = capfd.readouterr()
        done = Done(code, output.out, output.err)
        assert "Traceback" not in done.text
        return done

    return command


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small log as Parquet."""
    synth = small_spec("data.synth.num_train_samples=600", "data.synth.num_eval_samples=200").data.synth
    assert synth is not None
    folder = tmp_path_factory.mktemp("log")
    write_parquet(synth, folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Path:
    """A folder with one finished run, `small-001`, of the Parquet log."""
    root = tmp_path_factory.mktemp("runs")
    run.train(parquet_spec(log), root=root)
    return root


def recipe(*assignments: str, plain: Any = None) -> str:
    """A recipe file in the current folder."""
    Path("mine.yaml").write_text(yaml.safe_dump(override(small_plain() if plain is None else plain, assignments)))
    return "mine.yaml"


def parquet_recipe(folder: Path, *assignments: str) -> str:
    return recipe(plain=to_plain(parquet_spec(folder, *assignments)))


def changed(log: Path, change: Change, only: str = "*") -> Path:
    """A copy of the log, in the current folder, some files of which went through `change`."""
    folder = Path("changed").absolute()
    folder.mkdir()
    for file in log.glob("*.parquet"):
        table = pq.read_table(file)
        pq.write_table(change(table) if file.match(f"{only}.parquet") else table, folder / file.name)
    return folder


def with_values(column: str, values: Any) -> Change:
    """A table whose `column` begins with `values`, or has the type of a whole array given."""

    def change(table: pa.Table) -> pa.Table:
        if isinstance(values, pa.DataType):
            new = table[column].cast(values)
        else:
            whole = table[column].to_pylist()
            new = pa.array([*values, *whole[len(values) :]], table[column].type)
        return table.set_column(table.schema.get_field_index(column), column, new)

    return change


def assert_refused(done: Done, *says: str) -> None:
    assert done.code == 2, done.text
    assert done.err.startswith("error: ")
    for text in says:
        assert text in done.err
    assert not list(Path().glob("runs/*/checkpoints"))


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("train.bach_size=1", "train.bach_size: unknown key: did you mean `batch_size`?"),
        ("train.batch_size=many", "train.batch_size: expected whole number, got 'many'"),
        ("train.batch_size=0", "train.batch_size: must be at least 1, got 0"),
        ("features.sparse.0.num_rows=-1", "features.sparse[0].num_rows: must be at least 1, got -1"),
        ("features.sparse.0={name: x, table: t}", "features.sparse[0].table: no table `t`"),
        ("features.sparse.0.width=3", "`interaction: dot` needs every table as wide as model.width, 8"),
        ("nonsense", "cannot read `--set nonsense`: write it as key.path=value"),
        ("=1", "write it as key.path=value"),
        ("seed={", "cannot read the value in `--set seed={` as YAML"),
        ("scale=.inf", "scale: must be above 0 and finite"),
        ("data.parquet.train=x", "give exactly one of `synth` and `parquet`"),
        ("features.dense.0.name=other_{i}", "the synthetic log has no column `other_0`"),
        ("features.sparse.0.num_rows=1e12", "--set scale="),
    ],
)
def test_train_refuses_a_recipe_that_cannot_be_right(rowstead: Command, assignment: str, says: str) -> None:
    assert_refused(rowstead("train", recipe(), "--set", assignment), says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1", "bad.yaml is not valid YAML"),
        ("", "bad.yaml: expected a mapping of keys, got None"),
        ("just words", "bad.yaml: expected a mapping of keys, got 'just words'"),
        ("name: a\nname: b\n", "key `name` is given twice"),
    ],
)
def test_train_refuses_a_file_that_is_no_recipe(rowstead: Command, text: str, says: str) -> None:
    Path("bad.yaml").write_text(text)
    assert_refused(rowstead("train", "bad.yaml"), says)


def test_train_refuses_a_binary_file(rowstead: Command) -> None:
    Path("bad.yaml").write_bytes(bytes(range(256)))
    assert_refused(rowstead("train", "bad.yaml"), "cannot read bad.yaml")


@pytest.mark.parametrize("command", ["train", "recipes"])
def test_an_unknown_recipe_names_the_nearest(rowstead: Command, command: str) -> None:
    assert_refused(rowstead(command, "quikstart"), "no recipe file or shipped recipe `quikstart`: did you mean `quickstart`?")


def test_recipes_are_listed_and_shown(rowstead: Command) -> None:
    listed = rowstead("recipes")
    assert listed.code == 0
    assert re.search(r"^quickstart +A small click log", listed.out, re.MULTILINE)
    shown = rowstead("recipes", "quickstart")
    assert yaml.safe_load(shown.out)["name"] == "quickstart"
    Path("binary").write_bytes(b"\xff\xfe")
    assert rowstead("recipes", "binary").code == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU other kernels run")
def test_train_says_which_kernels_run(rowstead: Command) -> None:
    assert "kernels: cpu (Numba, 1 thread)\n" in rowstead("train", recipe("train.max_steps=2")).out
    assert "kernels: cpu (Numba, 2 threads)\n" in rowstead("train", recipe("train.max_steps=2", "threads=2")).out
    assert (
        "kernels: reference (plain torch, 1 thread)\n" in rowstead("train", recipe("train.max_steps=2", "kernel=reference")).out
    )


def test_train_profile_shows_where_the_time_went_and_goes_on(rowstead: Command) -> None:
    done = rowstead("train", recipe("train.max_steps=35"), "--profile")
    assert re.search(r"^  row update +[\d.]+ +\d+%$", done.out, re.MULTILINE)
    assert "finished after 35 steps" in done.out
    assert done.err == ""
    assert Path("runs/small-001/trace.json").is_file()


def test_missing_files_are_named(rowstead: Command, tmp_path: Path) -> None:
    done = rowstead("train", parquet_recipe(tmp_path / "nowhere"))
    assert_refused(done, "nowhere/train-*.parquet")


def test_files_without_rows_are_named(rowstead: Command, log: Path) -> None:
    empty = changed(log, lambda table: table.slice(0, 0), "train-*")
    assert_refused(rowstead("train", parquet_recipe(empty)), "no rows for the train split", "train-*.parquet")


@pytest.mark.parametrize("content", [b"", b"not Parquet at all", b"PAR1" + bytes(100)])
def test_a_file_that_is_no_parquet_is_named(rowstead: Command, log: Path, content: bytes) -> None:
    broken = changed(log, lambda table: table)
    (broken / "train-00000.parquet").write_bytes(content)
    assert_refused(rowstead("train", parquet_recipe(broken)), "train-00000.parquet` is no Parquet file")


@pytest.mark.parametrize(
    ("column", "kind"),
    [("dense_0", pa.string()), ("label", pa.string()), ("true_p", pa.string()), ("sparse_0", pa.list_(pa.float64()))],
)
def test_a_column_of_the_wrong_type_is_named(rowstead: Command, log: Path, column: str, kind: pa.DataType) -> None:
    wrong = changed(log, with_values(column, kind))
    assert_refused(rowstead("train", parquet_recipe(wrong)), f"`{column}`", "train-00000.parquet")


def test_a_column_that_is_not_there_is_named_with_the_nearest(rowstead: Command, log: Path) -> None:
    done = rowstead("train", parquet_recipe(log), "--set", "data.parquet.label=lable")
    assert_refused(done, "`lable`", "did you mean `label`?")


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("dense_2", np.nan, "give the feature a `missing` value"),
        ("dense_2", None, "give the feature a `missing` value"),
        ("dense_2", np.inf, "is not finite; give the feature a `clip: [low, high]`"),
        ("label", 2.0, "is no label: labels are numbers from 0 to 1"),
        ("label", -1.0, "is no label"),
        ("label", np.nan, "is no label"),
    ],
)
def test_a_bad_value_is_named_by_file_row_and_column(
    rowstead: Command, log: Path, column: str, value: float, says: str
) -> None:
    good = pq.read_table(log / "train-00000.parquet")[column].to_pylist()[:7]
    bad = changed(log, with_values(column, [*good, value]), "train-*")
    done = rowstead("train", parquet_recipe(bad))
    assert_refused(done, "train-00000.parquet", "row 7", f"`{column}`", says, "on_bad_row: skip")


def test_skipped_rows_are_counted_and_reported(rowstead: Command, log: Path) -> None:
    bad = changed(log, with_values("dense_2", [np.nan, 0.0, np.inf]), "train-*")
    done = rowstead("train", parquet_recipe(bad, "data.parquet.on_bad_row=skip"))
    assert done.code == 0
    assert "left out 2 bad rows while reading the training split" in done.out


def test_equal_labels_leave_ne_undefined_and_say_so(rowstead: Command, log: Path) -> None:
    equal = changed(log, with_values("label", [0.0] * 200), "eval-*")
    done = rowstead("train", parquet_recipe(equal))
    assert done.code == 0
    assert "NE undefined (all labels are equal)" in done.out
    assert re.search(r"NE +│ undefined: all labels are equal", done.out)
    assert "AUC" not in done.out


def test_a_folder_that_exists_is_refused(rowstead: Command, tmp_path: Path) -> None:
    assert rowstead("train", recipe("train.max_steps=1"), "--out", "here").code == 0
    before = sorted(tmp_path.rglob("*"))
    assert_refused(rowstead("train", recipe("train.max_steps=1"), "--out", "here"), "here already holds a run", "--resume here")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("option", ["--out", "--runs"])
def test_a_folder_that_cannot_be_written_is_named(rowstead: Command, option: str) -> None:
    # In /proc not even root may make a folder.
    assert_refused(rowstead("train", recipe("train.max_steps=1"), option, "/proc/run"), "cannot use /proc/run: ")


@pytest.mark.parametrize("option", ["--out", "--runs"])
def test_a_file_where_a_folder_should_be_is_named(rowstead: Command, option: str) -> None:
    Path("file").write_text("precious")
    assert_refused(rowstead("train", recipe("train.max_steps=1"), option, "file/run"), "cannot use file/run: Not a directory")
    assert Path("file").read_text() == "precious"


@pytest.mark.parametrize("arguments", [("evaluate",), ("train", "--resume"), ("predict", "--out", "p.parquet")])
def test_an_unknown_run_names_the_nearest(rowstead: Command, runs: Path, arguments: tuple[str, ...]) -> None:
    done = rowstead(*arguments, "smal-001", "--runs", str(runs))
    assert done.code == 2
    assert "no run `smal-001`" in done.err
    assert "did you mean `small-001`?" in done.err
    nothing = rowstead(*arguments, "last", "--runs", "empty")
    assert nothing.code == 2
    assert "`rowstead train` makes one" in nothing.err


def test_a_folder_that_is_no_run_is_refused(rowstead: Command, tmp_path: Path) -> None:
    assert_refused(rowstead("evaluate", str(tmp_path)), "is not the folder of a run: it has no spec.yaml")


@pytest.mark.parametrize("extra", [("--set", "seed=2"), ("--init-from", "x"), ("--out", "y"), ("quickstart",)])
def test_resume_takes_nothing_else(rowstead: Command, extra: tuple[str, ...]) -> None:
    assert_refused(rowstead("train", "--resume", "last", *extra), "--resume goes on with a run as it was started: leave out")


def test_a_checkpoint_of_another_model_is_refused(rowstead: Command, runs: Path, log: Path) -> None:
    other = parquet_recipe(log, "model.width=4")
    done = rowstead("train", other, "--init-from", str(runs / "small-001"))
    assert_refused(done, "is a checkpoint of another model", "spec.yaml")


def test_a_run_whose_recipe_was_changed_by_hand_is_refused(rowstead: Command, tmp_path: Path) -> None:
    assert rowstead("train", recipe("train.max_steps=1"), "--out", "here").code == 0
    file = tmp_path / "here" / "spec.yaml"
    file.write_text(file.read_text().replace("width: 8", "width: 4"))
    for arguments in (("evaluate", "here"), ("train", "--resume", "here")):
        done = rowstead(*arguments)
        assert done.code == 2
        assert "is a checkpoint of another model" in done.err
    file.write_text("name: [")
    done = rowstead("evaluate", "here")
    assert done.code == 2
    assert "here/spec.yaml is not valid YAML" in done.err


def test_a_damaged_checkpoint_is_named_by_every_command_that_reads_it(rowstead: Command) -> None:
    assert rowstead("train", recipe("train.max_steps=2", "train.checkpoint_every=1"), "--out", "here").code == 0
    shard = Path("here/checkpoints/step-000000002/shard-00000.safetensors")
    os.truncate(shard, 100)
    done = rowstead("evaluate", "here")
    assert done.code == 0
    assert "here/checkpoints/step-000000002 is damaged: shard-00000.safetensors is truncated" in done.out
    resumed = rowstead("train", "--resume", "here")
    assert resumed.code == 0
    assert "step-000000002 is damaged" in resumed.out
    assert "resuming here after step 1" in resumed.out


def test_evaluate_scores_the_run_or_other_files(rowstead: Command, runs: Path, log: Path) -> None:
    own = rowstead("evaluate", "last", "--runs", str(runs))
    assert own.code == 0
    assert "on 200 examples" in own.out
    assert re.search(r"NE +│ [01]\.\d{4}", own.out)
    other = rowstead("evaluate", str(runs / "small-001"), "--data", f"{log}/train-*.parquet")
    assert "on 600 examples" in other.out
    missing = rowstead("evaluate", str(runs / "small-001"), "--data", "nowhere.parquet")
    assert_refused(missing, "nowhere.parquet")


def test_evaluate_needs_labels(rowstead: Command, runs: Path, log: Path) -> None:
    bare = changed(log, lambda table: table.drop_columns(["label"]))
    assert_refused(rowstead("evaluate", "last", "--runs", str(runs), "--data", f"{bare}/eval-*.parquet"), "`label`")
    done = rowstead("predict", "last", "--runs", str(runs), "--data", f"{bare}/eval-*.parquet", "--out", "p.parquet")
    assert done.code == 0
    assert pq.read_table("p.parquet").num_rows == 200


def test_predict_refuses_what_it_cannot_write(rowstead: Command, runs: Path) -> None:
    arguments = ("predict", "last", "--runs", str(runs), "--out")
    assert_refused(rowstead(*arguments, "nowhere/p.parquet"), "there is no folder nowhere")
    Path("p.parquet").write_text("precious")
    assert_refused(rowstead(*arguments, "p.parquet"), "p.parquet exists", "--overwrite")
    assert Path("p.parquet").read_text() == "precious"
    assert rowstead(*arguments, "p.parquet", "--overwrite").code == 0
    assert pq.read_table("p.parquet").num_rows == 200


def test_predict_never_replaces_the_log_it_reads(rowstead: Command, runs: Path, log: Path) -> None:
    folder = changed(log, lambda table: table)
    file = next(folder.glob("eval-*.parquet"))
    before = file.read_bytes()
    link = folder / "link.parquet"
    link.symlink_to(file)
    for out in (file, link):
        arguments = ("predict", "last", "--runs", str(runs), "--data", str(file), "--out", str(out), "--overwrite")
        assert_refused(rowstead(*arguments), "a file of the log itself")
    assert file.read_bytes() == before


def as_text(table: pa.Table) -> pa.Table:
    texts = pa.array([[str(i) for i in ids] for ids in table["sparse_0"].to_pylist()])
    return table.set_column(table.schema.get_field_index("sparse_0"), "sparse_0", texts)


def test_text_ids_where_integers_were_before_are_refused(rowstead: Command, runs: Path, log: Path) -> None:
    folder = changed(log, as_text, only="eval-*")
    assert_refused(rowstead("train", parquet_recipe(folder)), "column `sparse_0` holds text, but integers before")
    for command in (("evaluate",), ("predict", "--out", "p.parquet")):
        done = rowstead(command[0], "last", *command[1:], "--runs", str(runs), "--data", f"{folder}/eval-*.parquet")
        assert_refused(done, "column `sparse_0` holds text, but integers before")


def test_text_ids_cannot_be_rows_or_share_a_table_with_integers(rowstead: Command, log: Path) -> None:
    folder = changed(log, as_text)
    assert_refused(rowstead("train", parquet_recipe(folder, "features.sparse.0.hash=modulo")), "use `hash: mix`")
    sharing = "{sparse: [{name: sparse_0, table: t}, {name: sparse_1, table: t}], tables: [{name: t, num_rows: 9}]}"
    done = rowstead("train", parquet_recipe(folder, f"features={sharing}"))
    assert_refused(done, "share table `t`", "sparse_1")


def test_columns_of_the_same_name_are_refused(rowstead: Command, log: Path) -> None:
    folder = changed(log, lambda table: table.append_column("dense_0", table["dense_1"]))
    assert_refused(rowstead("train", parquet_recipe(folder)), "two columns are named `dense_0`")


def test_describe_names_a_file_that_is_no_parquet(rowstead: Command) -> None:
    Path("junk.parquet").write_bytes(b"junk" * 100)
    assert_refused(rowstead("data", "describe", "junk.parquet"), "`junk.parquet` is no Parquet file")


def test_an_unknown_option_or_command_prints_usage(rowstead: Command) -> None:
    for arguments in (("trian",), ("train", "--sett", "a=1"), ("evaluate",)):
        done = rowstead(*arguments)
        assert done.code == 2
        assert done.err.startswith("Usage: ")
        assert "Error: " in done.err


def test_ctrl_c_before_training_ends_with_130(rowstead: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run, "train", interrupted)
    done = rowstead("train", recipe())
    assert done.code == 130
    assert "interrupted" in done.err


def test_running_out_of_memory_is_said_plainly(rowstead: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise MemoryError("Unable to allocate 3.7 TiB")

    monkeypatch.setattr(run, "train", full)
    assert_refused(rowstead("train", recipe()), "out of memory: Unable to allocate 3.7 TiB")


def test_where_output_is_no_terminal_lines_are_plain(rowstead: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rowstead.console.PLAIN_EVERY_S", 0.0)
    done = rowstead("train", recipe("train.max_steps=20", "train.eval_every=10"))
    assert done.code == 0
    assert "\x1b" not in done.text
    line = r"^step \d+ of 20 · [\d,]+ samples/s · loss \d\.\d+ · NE \d\.\d+ · waiting for data \d+% · \d+ s left$"
    assert len(re.findall(line, done.out, re.MULTILINE)) == 19
    assert re.search(r"^step 10: NE \d\.\d+ · log loss", done.out, re.MULTILINE)
    for row in ("NE", "best possible NE", "AUC", "calibration", "samples/s", "where the time went", "model", "next"):
        assert re.search(rf"│ {row} +│", done.out), row
    assert "rowstead evaluate runs/small-001" in done.out
    evaluated = rowstead("evaluate", "last")
    assert "2,000 of 2,000 examples" in evaluated.out


def test_help_answers_without_torch() -> None:
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('heavy:', sorted({'torch', 'numba', 'pyarrow', 'numpy'} & set(sys.modules))))\n"
        "sys.argv = ['rowstead', '--help']\n"
        "from rowstead.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "heavy: []" in done.stdout
    for command in ("train", "evaluate", "predict", "export", "data", "recipes"):
        assert re.search(rf"^  {command} ", done.stdout, re.MULTILINE), command


def test_a_mistake_in_a_recipe_shows_before_torch_is_imported() -> None:
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        "sys.argv = ['rowstead', 'train', '--set', 'nonsense']\n"
        "from rowstead.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_on_a_terminal_a_progress_bar_appears(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(small_plain()))
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "40"}
    for name in ("NO_COLOR", "CI"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "rowstead", "train", "mine.yaml", "--set", "train.eval_every=50"],
        cwd=tmp_path,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
    )
    os.close(slave)
    output = b""
    with contextlib.suppress(OSError):  # the terminal closes when the process ends
        while part := os.read(master, 1 << 16):
            output += part
    os.close(master)
    assert process.wait() == 0
    text = output.decode()
    assert "\x1b[" in text
    assert "━" in text
    assert re.search(r"samples/s.*loss.*NE.*waiting for data", text)
    assert "ETA" in text
    assert "step 50: NE" in text
