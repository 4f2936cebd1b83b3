"""rowstead trains deep learning recommendation models. Every embedding row has a home.

>>> import rowstead
>>> recipe = rowstead.first_recipe(frame, label="clicked")   # a guess from the columns of a DataFrame, an Arrow table or files
>>> result = rowstead.train(recipe)                          # or a recipe's path, a shipped one's name, a dict
>>> model = result.load()                                    # an ordinary torch.nn.Module
>>> model.predict(frame)                                     # click probabilities as an array
"""

from __future__ import annotations

import importlib
import os
from typing import Any

# OpenMP reads these when torch is imported. Threads that spin for long between operations take cores from the reader and from each
# other: on a busy machine a step takes many times as long. Threads that sleep at once wake up late. So they spin for some tens of
# microseconds (GNU's OpenMP) or not at all (others).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

__version__ = "0.1.0"

_MODULES = {
    "train": "rowstead.run",
    "resume": "rowstead.run",
    "load": "rowstead.training.trained",
    "evaluate": "rowstead.training.trained",
    "importance": "rowstead.training.importance",
    "Importances": "rowstead.training.importance",
    "Result": "rowstead.run",
    "first_recipe": "rowstead.data.first_recipe",
    "Callback": "rowstead.training.progress",
    "Progress": "rowstead.training.progress",
    "Quality": "rowstead.training.metrics",
    "Record": "rowstead.spec.record",
    "DLRM": "rowstead.nn.dlrm",
    "nearest": "rowstead.nn.nearest",
    "predict": "rowstead.serve.predict",
    "export": "rowstead.serve.export",
    "load_exported": "rowstead.serve.exported",
    "Exported": "rowstead.serve.exported",
    "Batch": "rowstead.data.batch",
    "Sparse": "rowstead.data.batch",
    "sparse_from_kjt": "rowstead.data.batch",
    "kjt_from_sparse": "rowstead.data.batch",
    "EmbeddingBags": "rowstead.nn.embedding_bags",
    "Embeddings": "rowstead.nn.embeddings",
    "Network": "rowstead.nn.network",
    "NetworkInputs": "rowstead.nn.network",
    "BagTable": "rowstead.nn.bag_tables",
    "EmbeddingTable": "rowstead.nn.bag_tables",
    "FusedOptimizer": "rowstead.nn.fused_optimizer",
    "fuse_embedding_optimizer": "rowstead.nn.fuse",
    "PooledFeatures": "rowstead.nn.bag_tables",
    "JaggedRows": "rowstead.nn.embeddings",
    "RunSpec": "rowstead.spec.run",
    "DataSpec": "rowstead.spec.data",
    "SynthSpec": "rowstead.spec.data",
    "InterestsSpec": "rowstead.spec.data",
    "ConversionSpec": "rowstead.spec.data",
    "ParquetSpec": "rowstead.spec.data",
    "CsvSpec": "rowstead.spec.data",
    "SplitSpec": "rowstead.spec.data",
    "FeaturesSpec": "rowstead.spec.features",
    "DenseFeatureSpec": "rowstead.spec.features",
    "SparseFeatureSpec": "rowstead.spec.features",
    "EncoderSpec": "rowstead.spec.encoders",
    "TableSpec": "rowstead.spec.features",
    "ModelSpec": "rowstead.spec.model",
    "TaskSpec": "rowstead.spec.heads",
    "TaskHeadSpec": "rowstead.spec.heads",
    "InteractionSpec": "rowstead.spec.interactions",
    "TrainSpec": "rowstead.spec.train",
    "DenseOptimizerSpec": "rowstead.spec.train",
    "SparseOptimizerSpec": "rowstead.spec.row_optimizers",
    "ScheduleSpec": "rowstead.spec.train",
    "EarlyStopSpec": "rowstead.spec.train",
    "SyncSpec": "rowstead.spec.sync",
    "TablePlacementSpec": "rowstead.spec.placement",
    "MemorySpec": "rowstead.spec.placement",
    "FleetSpec": "rowstead.spec.fleet",
    "load_recipe": "rowstead.spec.run",
    "RowsteadError": "rowstead.spec.errors",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name on first access: `import rowstead` and the command line start without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'rowstead' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
