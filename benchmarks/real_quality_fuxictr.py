"""Trains one network with FuxiCTR for `benchmarks.real_quality`; runs in FuxiCTR's environment, which has no rowstead.

`python real_quality_fuxictr.py TASK`: TASK is JSON with the model, the seed, the folder of the rows and the settings; prints one line of JSON.
The networks are FuxiCTR's layers put together as in its model zoo, which its package does not have; training is its own.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch import layers
from fuxictr.pytorch.models import BaseModel
from fuxictr.pytorch.torch_utils import seed_everything
from torch import nn

ONE_ID = ("user", "item", "gender", "age", "occupation", "zip_prefix", "hour", "weekday", "year")
MOST_GENRES = 6


class Rows:
    """Batches of one part, as dicts of tensors; those for training in a new order in each epoch."""

    def __init__(self, file: Path, batch_size: int, *, shuffles: bool) -> None:
        table = pq.read_table(file, columns=["label", "c_genres", *(f"c_{name}" for name in ONE_ID)])
        self.columns = {name: torch.from_numpy(table[f"c_{name}"].to_numpy()) for name in ONE_ID}
        genres = np.zeros((table.num_rows, MOST_GENRES), np.int64)
        for index, ids in enumerate(table["c_genres"].to_pylist()):
            genres[index, : len(ids)] = ids
        self.columns["genres"] = torch.from_numpy(genres)
        self.columns["label"] = torch.from_numpy(table["label"].to_numpy().astype(np.float32))
        self.batch_size, self.shuffles, self.num_rows = batch_size, shuffles, table.num_rows

    def __len__(self) -> int:
        return math.ceil(self.num_rows / self.batch_size)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        order = torch.randperm(self.num_rows) if self.shuffles else torch.arange(self.num_rows)
        for chosen in order.split(self.batch_size):
            yield {name: values[chosen] for name, values in self.columns.items()}


class Net(BaseModel):
    """What the four networks share: embeddings, an optimizer, and a probability."""

    def __init__(self, feature_map: FeatureMap, settings: dict[str, Any], root: str) -> None:
        super().__init__(
            feature_map,
            model_root=root,
            metrics=["logloss", "AUC"],
            verbose=0,
            embedding_regularizer=settings["l2"],
            early_stop_patience=settings["patience"],
        )
        self.width, self.fields = settings["width"], feature_map.num_fields
        self.settings = settings
        self.embedding = layers.FeatureEmbedding(feature_map, self.width)

    def mlp(self, inputs: int, *, has_output: bool) -> nn.Module:
        return layers.MLP_Block(
            input_dim=inputs,
            output_dim=1 if has_output else None,
            hidden_units=self.settings["hidden"],
            hidden_activations="ReLU",
            dropout_rates=self.settings["dropout"],
        )

    def finish(self) -> None:
        self.compile("adam", "binary_crossentropy", self.settings["lr"])
        self.reset_parameters()

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = self.get_inputs(inputs)
        return {"y_pred": self.output_activation(self.logits(found, self.embedding(found)))}


class DLRM(Net):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments)
        self.interaction = layers.InnerProductInteraction(self.fields, output="inner_product")
        self.top = self.mlp(self.fields * (self.fields - 1) // 2, has_output=True)
        self.finish()

    def logits(self, found: dict[str, torch.Tensor], fields: torch.Tensor) -> torch.Tensor:
        return self.top(self.interaction(fields))


class DeepFM(Net):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments)
        self.fm = layers.FactorizationMachine(self.feature_map)
        self.deep = self.mlp(self.fields * self.width, has_output=True)
        self.finish()

    def logits(self, found: dict[str, torch.Tensor], fields: torch.Tensor) -> torch.Tensor:
        return self.fm(found, fields) + self.deep(fields.flatten(1))


class DCNv2(Net):
    def __init__(self, *arguments: Any, cross_layers: int) -> None:
        super().__init__(*arguments)
        width = self.fields * self.width
        self.cross, self.deep = layers.CrossNetV2(width, cross_layers), self.mlp(width, has_output=False)
        self.out = nn.Linear(width + self.settings["hidden"][-1], 1)
        self.finish()

    def logits(self, found: dict[str, torch.Tensor], fields: torch.Tensor) -> torch.Tensor:
        x = fields.flatten(1)
        return self.out(torch.cat([self.cross(x), self.deep(x)], dim=1))


class FinalMLP(Net):
    """FinalMLP without gates; its bilinear layer is in the model zoo only, so it is written here as there."""

    def __init__(self, *arguments: Any, heads: int) -> None:
        super().__init__(*arguments)
        last, self.heads = self.settings["hidden"][-1], heads
        self.first, self.second = (self.mlp(self.fields * self.width, has_output=False) for _ in range(2))
        self.w1, self.w2 = nn.Linear(last, 1), nn.Linear(last, 1)
        self.w12 = nn.Parameter(torch.empty(heads, last // heads, last // heads))
        self.finish()
        nn.init.xavier_normal_(self.w12)

    def logits(self, found: dict[str, torch.Tensor], fields: torch.Tensor) -> torch.Tensor:
        x = fields.flatten(1)
        first, second = self.first(x), self.second(x)
        heads = torch.einsum(
            "bhi,hij,bhj->b", first.unflatten(1, (self.heads, -1)), self.w12, second.unflatten(1, (self.heads, -1))
        )
        return self.w1(first) + self.w2(second) + heads.unsqueeze(1)


NETWORKS = {"dlrm": DLRM, "deepfm": DeepFM, "dcnv2": DCNv2, "finalmlp": FinalMLP}


def feature_map_of(sizes: dict[str, int]) -> FeatureMap:
    found = FeatureMap("movielens", "")
    found.labels = ["label"]
    for name in ONE_ID:
        found.features[name] = {"source": "", "type": "categorical", "vocab_size": sizes[name], "padding_idx": 0}
    found.features["genres"] = {
        "source": "",
        "type": "sequence",
        "vocab_size": sizes["genres"],
        "padding_idx": 0,
        "max_len": MOST_GENRES,
        "feature_encoder": "layers.MaskedAveragePooling()",
    }
    found.num_fields = len(found.features)
    return found


def main() -> None:
    task = json.loads(sys.argv[1])
    settings, folder = task["settings"], Path(task["folder"])
    torch.set_num_threads(1)
    seed_everything(task["seed"])
    train, valid, test = (
        Rows(folder / f"{part}.parquet", settings["batch_size"], shuffles=part == "train") for part in ("train", "eval", "test")
    )
    with tempfile.TemporaryDirectory() as root:
        Path(root, "movielens").mkdir()
        model = NETWORKS[task["model"]](feature_map_of(task["sizes"]), settings, root, **task["options"])
        start = time.perf_counter()
        model.fit(train, epochs=settings["epochs"], validation_data=valid)
        found = model.evaluate(test, metrics=["logloss", "AUC"])
    print(
        json.dumps(
            {
                "auc": float(found["AUC"]),
                "log_loss": float(found["logloss"]),
                "train_s": time.perf_counter() - start,
                "date": time.strftime("%Y-%m-%d"),
                "versions": {name: version(name) for name in ("fuxictr", "torch")},
            }
        )
    )


if __name__ == "__main__":
    main()
