"""A network of the user's own, in a file outside the package, does what the built-in one does; what is wrong with it is said kindly."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml

import rowstead
from rowstead.records.run_folder import RunFolder
from rowstead.run import resume, train
from rowstead.spec.errors import CheckpointError, RowsteadError
from rowstead.spec.run import load_recipe
from tests.small_runs import (
    RecordingCallback,
    assert_same_weights,
    figures_of,
    parquet_spec,
    small_plain,
    small_spec,
    tensors_in,
    written_log,
)

PAGE = Path(__file__).parents[2] / "docs" / "networks.md"

LINEAR = """
    import rowstead
    import torch
    from torch import nn


    class Linear(rowstead.Network):
        def __init__(self, inputs, options):
            super().__init__(inputs, options)
            self.layer = nn.Linear(inputs.num_dense + inputs.pooled_width, 1)

        def forward(self, dense, pooled):
            return self.layer(torch.cat([dense, pooled], dim=1)).squeeze(1)


    class Split(Linear):
        def project(self, dense):
            return torch.relu(dense)

        def join(self, projected, pooled):
            return self.layer(torch.cat([projected, pooled], dim=1)).squeeze(1)

        def forward(self, dense, pooled):
            return self.join(self.project(dense), pooled)


    class ByFeature(Linear):
        def forward(self, dense, pooled):
            by_name = self.by_feature(pooled)
            assert list(by_name) == list(self.inputs.sparse) == ["sparse_0", "sparse_1", "sparse_2"]
            assert torch.equal(self.vectors(pooled)[:, 1], by_name["sparse_1"])
            return super().forward(dense, torch.cat(list(by_name.values()), dim=1))


    class Branching(Linear):
        def forward(self, dense, pooled):
            return super().forward(dense if dense.sum() > 0 else -dense, pooled)
"""


UNUSUAL = """
    class Dropping(Linear):
        def __init__(self, inputs, options):
            super().__init__(inputs, options)
            self.hidden = nn.Sequential(nn.Linear(inputs.num_dense, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5))
            self.out = nn.Linear(16, 1)
            self.unused = nn.Linear(3, 3)

        def project(self, dense):
            return self.hidden(dense)

        def join(self, projected, pooled):
            dense = pooled.new_zeros(len(pooled), self.inputs.num_dense)
            return self.out(projected).squeeze(1) + super().forward(dense, pooled)

        forward = rowstead.Network.forward


    class Item(Dropping):
        def join(self, projected, pooled):
            return super().join(projected, pooled) * (1.0 if pooled.sum().item() > 0 else 0.9)


    class DenseOnly(Linear):
        def forward(self, dense, pooled):
            return super().forward(dense, torch.zeros_like(pooled))


    class SparseOnly(Dropping):
        def join(self, projected, pooled):
            return Linear.forward(self, pooled.new_zeros(len(pooled), self.inputs.num_dense), pooled)
"""


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    return written(tmp_path / "my_networks.py", LINEAR)


@pytest.fixture
def page_example(tmp_path: Path) -> Path:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return written(tmp_path / "two_towers.py", found[1])


def written(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text))
    return path


def test_the_example_of_the_page_trains_resumes_evaluates_predicts_and_exports(tmp_path: Path, page_example: Path) -> None:
    log = written_log(tmp_path / "log")
    spec = parquet_spec(
        log,
        f"model.network={page_example}:TwoTowers",
        "model.options={width: 12, dropout: 0.3}",
        "train.max_steps=100",
        "data.negative_keep_rate=0.5",
    )
    straight = train(spec, out=tmp_path / "straight")
    train(spec, out=tmp_path / "stopped", callback=RecordingCallback(stop_after=50))
    ended = resume(str(tmp_path / "stopped"))
    assert ended.outcome.position.step == 100
    assert_same_weights(straight.folder, ended.folder)
    assert "net.sparse_tower.3.weight" in tensors_in(ended.folder)

    run = str(ended.folder)
    assert rowstead.evaluate(run).figures() == figures_of(straight)
    rowstead.predict(run, tmp_path / "run.parquet")
    p = pq.read_table(tmp_path / "run.parquet").column("p").to_numpy()
    rowstead.export(run, tmp_path / "exported")
    page_example.unlink()  # an exported model needs no code
    exported = rowstead.load_exported(tmp_path / "exported")
    rows = pq.read_table(sorted(log.glob("eval-*.parquet")))
    np.testing.assert_allclose(exported.predict(rows), p, rtol=1e-5)
    rowstead.predict(str(tmp_path / "exported"), tmp_path / "exported.parquet", data=[f"{log}/eval-*.parquet"])
    np.testing.assert_allclose(pq.read_table(tmp_path / "exported.parquet").column("p").to_numpy(), p, rtol=1e-5)
    with pytest.raises(RowsteadError, match=r"there is no file .*two_towers\.py"):
        rowstead.load(run)


def test_a_class_in_a_module_trains_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_package").mkdir()
    written(tmp_path / "own_package" / "nets.py", LINEAR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    result = train(small_spec("model.network=own_package.nets:Linear", "train.max_steps=10"), out=tmp_path / "run")
    assert rowstead.evaluate(str(result.folder)).figures() == figures_of(result)


@pytest.mark.parametrize("name", ["Split", "ByFeature"])
def test_pooled_rows_by_feature_and_a_forward_in_two_parts_train(tmp_path: Path, linear: Path, name: str) -> None:
    spec = small_spec("train.max_steps=10", f"model.network={linear}:{name}")
    train(spec, out=tmp_path / name)
    train(small_spec("train.max_steps=10", f"model.network={linear}:Linear"), out=tmp_path / "linear")
    own = tensors_in(tmp_path / name)
    assert own["net.layer.weight"].shape == (1, 28)
    if name == "ByFeature":
        assert_same_weights(tmp_path / name, tmp_path / "linear")


def test_hogwild_threads_train_it(tmp_path: Path, linear: Path) -> None:
    spec = small_spec("train.max_steps=20", f"model.network={linear}:Linear", "train.sync.hogwild_threads=2", "device=cpu")
    assert figures_of(train(spec, out=tmp_path / "run"))["auc"] > 0.5


def test_a_network_that_cannot_be_traced_is_not_exported(tmp_path: Path, linear: Path) -> None:
    train(small_spec("train.max_steps=2", f"model.network={linear}:Branching"), out=tmp_path / "run")
    with pytest.raises(
        RowsteadError, match=r"torch\.export cannot trace `.*:Branching`: .*Avoid branches on the values of tensors"
    ):
        rowstead.export(str(tmp_path / "run"), tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_a_relative_path_is_looked_for_beside_the_recipe_and_kept_absolute(
    tmp_path: Path, linear: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = small_plain()
    plain["model"] |= {"network": "my_networks.py:Linear"}
    plain["train"] |= {"max_steps": 2}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(plain))
    spec = load_recipe(str(tmp_path / "recipe.yaml"))
    assert spec.model.network == f"{linear}:Linear"
    folder = RunFolder(train(spec, out=tmp_path / "run").folder)
    assert yaml.safe_load(folder.spec_file.read_text())["model"]["network"] == f"{linear}:Linear"
    monkeypatch.chdir(tmp_path)
    assert small_spec("model.network=my_networks.py:Linear").model.network == f"{linear}:Linear"


def test_a_file_that_has_changed_is_reported_when_the_run_goes_on(tmp_path: Path, linear: Path) -> None:
    spec = small_spec("train.max_steps=10", f"model.network={linear}:Linear")
    train(spec, out=tmp_path / "run", callback=RecordingCallback(stop_after=5))
    unchanged, changed = RecordingCallback(stop_after=7), RecordingCallback()
    resume(str(tmp_path / "run"), callback=unchanged)
    linear.write_text(linear.read_text() + "\n# a remark\n")
    resume(str(tmp_path / "run"), callback=changed)
    assert not any("has changed since" in text for text in unchanged.messages)
    (message,) = (text for text in changed.messages if "has changed since" in text)
    assert message.startswith(f"{linear} has changed since ")


def test_weights_of_a_file_that_was_moved_are_taken_over_and_those_of_another_class_are_not(
    tmp_path: Path, linear: Path
) -> None:
    train(small_spec("train.max_steps=2", f"model.network={linear}:Linear"), out=tmp_path / "first")
    (tmp_path / "other").mkdir()
    moved = linear.rename(tmp_path / "other" / linear.name)
    train(
        small_spec("train.max_steps=2", f"model.network={moved}:Linear"),
        out=tmp_path / "second",
        init_from=str(tmp_path / "first"),
    )
    other = small_spec("train.max_steps=2", f"model.network={moved}:Split")
    with pytest.raises(CheckpointError, match=r"model\.network is 'my_networks\.py:Linear' there"):
        train(other, out=tmp_path / "third", init_from=str(tmp_path / "first"))


def test_building_leaves_the_random_state_of_the_caller_alone(linear: Path) -> None:
    from rowstead.training.build import build_model

    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    build_model(small_spec(f"model.network={linear}:Linear"), torch.device("cpu"), trains=True)
    assert torch.equal(torch.rand(1), expected)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("name", ["Dropping", "DenseOnly", "SparseOnly"])
def test_batch_norm_dropout_and_inputs_that_are_not_used_resume_bit_for_bit(tmp_path: Path, name: str) -> None:
    file = written(tmp_path / "my_networks.py", LINEAR + UNUSUAL)
    spec = small_spec("train.max_steps=20", f"model.network={file}:{name}")
    straight = train(spec, out=tmp_path / "straight")
    train(spec, out=tmp_path / "stopped", callback=RecordingCallback(stop_after=10))
    assert_same_weights(straight.folder, resume(str(tmp_path / "stopped")).folder)


@needs_gpu
@pytest.mark.parametrize("name", ["Linear", "Split", "Dropping", "Item", "DenseOnly", "SparseOnly"])
def test_on_a_gpu_it_trains_as_cuda_graphs_or_says_why_not_and_resumes_bit_for_bit(tmp_path: Path, name: str) -> None:
    file = written(tmp_path / "my_networks.py", LINEAR + UNUSUAL)
    spec = small_spec("train.max_steps=60", f"model.network={file}:{name}", "device=cuda")
    callback = RecordingCallback()
    graphs = train(spec, out=tmp_path / "graphs", callback=callback)
    failed = [text for text in callback.messages if "CUDA graph" in text]
    assert len(failed) == (name == "Item"), callback.messages
    train(spec, out=tmp_path / "stopped", callback=RecordingCallback(stop_after=30))
    assert_same_weights(graphs.folder, resume(str(tmp_path / "stopped")).folder)
    eager = train(dataclasses.replace(spec, train=dataclasses.replace(spec.train, cuda_graphs=False)), out=tmp_path / "eager")
    assert figures_of(graphs)["log_loss"] == pytest.approx(figures_of(eager)["log_loss"], rel=1e-3)


WRONG = {
    "class Net(rowstead.Network):\n    forwad = None": "defines no `forward`",
    "class Nett(rowstead.Network):\n    pass": "has no class `Net`: did you mean `Nett`?",
    "class Net:\n    pass": "is not a Network: derive the class from rowstead.Network",
    "x = 1": "has no class `Net`: it defines no rowstead.Network",
    "class Net(rowstead.Network)\n    pass": "the file raised SyntaxError: expected ':'\n  FILE, line LINE1: class Net(rowstead.Network)",
    "import nothing_like_it": "the file raised ModuleNotFoundError: No module named 'nothing_like_it'\n  FILE, line LINE1: import nothing",
    "class Net(Linear):\n    def __init__(self, inputs, options):\n        self.x = options['x']": (
        "its constructor raised KeyError: 'x'\n  FILE, line LINE3: self.x = options['x']"
    ),
    "class Net(Linear):\n    def forward(self, dense, pooled):\n        return self.layer(pooled)": (
        "it raised on two examples of zeros RuntimeError"
    ),
    "class Net(Linear):\n    def forward(self, dense, pooled):\n        return super().forward(dense, pooled)[:, None]": (
        "`forward` of `FILE:Net` must return one logit per example, floating point [2] for two examples, got float32 [2, 1]: "
        "add `.squeeze(1)`"
    ),
    "class Net(Linear):\n    def forward(self, dense, pooled):\n        return {}": "got a dict",
    "class Net(Linear):\n    def project(self, dense):\n        return dense": "defines one of `project` and `join`",
    "class Net(Linear):\n    def __init__(self, inputs, options):\n        super().__init__(inputs, options)\n        options.get('depth')": (
        "model.options.dept: the network has no such option: did you mean `depth`?"
    ),
    "class Net(rowstead.Network):\n    def forward(self, dense, pooled):\n        return pooled.sum(1)": "has no parameters to train",
    "class Net(Linear):\n    def __init__(self, inputs, options):\n        super().__init__(inputs, options)\n        self.requires_grad_(False)": (
        "does not require a gradient, and all parameters are trained: make it a buffer"
    ),
}


@pytest.mark.parametrize("body", WRONG)
def test_what_is_wrong_is_said_before_the_run_has_a_folder(tmp_path: Path, body: str) -> None:
    base = textwrap.dedent(LINEAR).partition("class Split")[0] if "(Linear)" in body else "import rowstead\n"
    file, start = tmp_path / "wrong.py", len(base.splitlines())
    file.write_text(base + body)
    options = "model.options={dept: 1}" if "depth" in body else "model.options=null"
    with pytest.raises(RowsteadError) as found:
        train(small_spec(f"model.network={file}:Net", options, "train.max_steps=2"), out=tmp_path / "run")
    expected = WRONG[body].replace("LINE1", str(start + 1)).replace("LINE3", str(start + 3))
    assert expected.replace("FILE", str(file)) in str(found.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("network", "problem"),
    [
        ("dlmr", "model.network: unknown network `dlmr`: did you mean `dlrm`?"),
        ("net.py:3x", "`3x` in `"),
        ("a-b:Net", "`a-b` in `a-b:Net` is neither a dotted module name nor a path that ends in .py"),
        ("no_such_package.nets:Net", "there is no module `no_such_package`"),
        ("FOLDER/my_network.py:Linear", "there is no file FOLDER/my_network.py: did you mean `my_networks.py`?"),
    ],
)
def test_a_network_that_is_not_there_is_refused(tmp_path: Path, linear: Path, network: str, problem: str) -> None:
    with pytest.raises(RowsteadError) as found:
        train(small_spec(f"model.network={network.replace('FOLDER', str(tmp_path))}"), out=tmp_path / "run")
    assert problem.replace("FOLDER", str(tmp_path)) in str(found.value)


def test_the_built_in_network_has_no_options() -> None:
    with pytest.raises(RowsteadError, match=r"model\.options: `dlrm` has no options: set `bottom`, `top` and `interaction`"):
        small_spec("model.options={width: 3}")
