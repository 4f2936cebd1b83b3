"""An exported folder serves raw columns as the model does, refuses what training refuses, and is whole or not there."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pyarrow as pa
import pytest
import torch

import rowstead
from rowstead.data.column_values import to_bags
from rowstead.serve import export as export_module
from rowstead.spec.errors import RowsteadError
from tests.serve.conftest import raw_columns


@pytest.fixture(scope="module")
def served(exported):
    return rowstead.load_exported(exported)


def rows(**changes):
    """Two good rows, some columns changed."""
    plain = {
        "age": [30.0, None],
        "price": [1.5, 20.0],
        "user": [7, -7],
        "city": ["a", None],
        "seen": [[1, 2, 3], []],
        "tags": [["x", "y", "z"], None],
        "slot": [[19], [0, 1]],
    }
    return {**plain, **changes}


def test_raw_columns_give_the_models_predictions(run, served):
    model = rowstead.load(run)
    for num_rows, seed in ((1, 1), (2, 2), (500, 3)):
        columns = raw_columns(num_rows, seed)
        expected = model.predict(model.encode(columns)).numpy()
        ours = served.predict(columns)
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6)
        assert (served.predict(pa.table(columns)) == ours).all()


def test_no_rows_give_no_predictions(served):
    assert served.predict({name: [] for name in rows()}).shape == (0,)


def test_folder_needs_nothing_of_the_run_and_says_what_its_inputs_mean(exported, tmp_path, served):
    moved = shutil.copytree(exported, tmp_path / "elsewhere")
    assert sorted(file.name for file in moved.iterdir()) == ["inputs.json", "program.pt2"]
    plain = json.loads((moved / "inputs.json").read_text())
    assert set(plain["arguments"]) == {"dense", "ids", "offsets"}
    assert plain["num_rows"] == {"user": 97, "city": 50, "items": 101, "tags": 31, "slot": 20}
    assert (rowstead.load_exported(moved).predict(rows()) == served.predict(rows())).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"price": [1.0, float("nan")]}, "row 1 .*column `price` has a missing value; set the feature's `missing`"),
        ({"age": [float("inf"), 1.0]}, "column `age` contains inf"),
        ({"price": ["cheap", "dear"]}, "column `price` has type string, but a dense feature"),
        ({"user": [1.5, 2.5]}, "column `user` contains 1.5, which is not whole"),
        ({"slot": [[20], [0]]}, "feature `slot`: id 20 is outside its table"),
        ({"slot": [[0], [0, -1]]}, "feature `slot`: id -1 is outside its table"),
        ({"user": [1]}, "columns differ in length"),
        ({"user": 7}, "column `user` cannot be read"),
    ],
)
def test_bad_rows_are_refused_as_in_training(served, changes, said):
    with pytest.raises(RowsteadError, match=said):
        served.predict(rows(**changes))


def test_missing_column_is_named_with_the_nearest(served):
    columns = rows()
    columns["prices"] = columns.pop("price")
    with pytest.raises(RowsteadError, match="no column `price`: did you mean `prices`"):
        served.predict(columns)


def test_an_id_that_truncation_drops_may_be_anything(served):
    assert (served.predict(rows(slot=[[19, 3, 999], [0, 1]])) == served.predict(rows(slot=[[19, 3], [0, 1]]))).all()


def test_existing_folder_is_refused_before_any_work(run, exported):
    with pytest.raises(RowsteadError, match="exists: choose another folder"):
        rowstead.export(run, exported)


def test_failed_export_leaves_nothing_behind(run, tmp_path, monkeypatch):
    def full_disk(program, file):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module, "trace_program", lambda program: None)
    monkeypatch.setattr(torch.export, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        rowstead.export(run, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_an_export_is_refused(tmp_path, exported):
    with pytest.raises(RowsteadError, match="there is no folder"):
        rowstead.load_exported(tmp_path / "nowhere")
    with pytest.raises(RowsteadError, match=r"is not an exported model: it has no inputs\.json"):
        rowstead.load_exported(tmp_path)
    broken = shutil.copytree(exported, tmp_path / "broken")
    plain = json.loads((broken / "inputs.json").read_text())
    for text, said in (
        ("{", "cannot be read"),
        ("[]", "has format None"),
        (json.dumps({**plain, "format": 99}), "has format 99"),
        (json.dumps({"format": 1}), "is damaged: it has no `features`"),
    ):
        (broken / "inputs.json").write_text(text)
        with pytest.raises(RowsteadError, match=said):
            rowstead.load_exported(broken)


def test_damaged_program_is_detected(tmp_path, exported):
    broken = shutil.copytree(exported, tmp_path / "broken")
    content = bytearray((broken / "program.pt2").read_bytes())
    content[len(content) // 2] ^= 1
    (broken / "program.pt2").write_bytes(content)
    with pytest.raises(RowsteadError, match=r"program\.pt2 is damaged"):
        rowstead.load_exported(broken)


def test_bare_program_needs_only_what_the_docs_say(exported, served):
    program = torch.export.load(exported / "program.pt2").module()
    dense = torch.tensor([[30.0, 1.5]])
    texts = to_bags(pa.array(["a", "x", "y"]), "text")[0].tolist()
    ids = torch.tensor([7, texts[0], 1, 2, 1, 2, texts[1], texts[2], 19])
    offsets = torch.tensor([0, 1, 2, 4, 6, 8, 9])
    one = {name: values[:1] for name, values in rows(seen=[[1, 2], []], tags=[["x", "y"], []]).items()}
    with torch.no_grad():
        assert program(dense, ids, offsets).numpy() == served.predict(one)


def test_text_hash_is_the_one_in_the_docs():
    assert to_bags(pa.array(["rowstead"]), "text")[0].tolist() == [3820275799957664673]
