"""docs/performance.md: what the benchmarks measured last, from the files under benchmarks/results/."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from docs import tables
from docs.headlines import headlines, slower
from docs.tables import Column, Row

PICTURES = Path(__file__).parent / "pictures"


def performance_page(note: str) -> str:
    """The whole page."""
    parts = [note, "# Performance", _IN_SHORT, headlines("../"), slower(), _INTRODUCTION]
    parts += ["## On a GPU", *_embedding("cuda"), *_step("cuda")]
    parts += ["## On a CPU", *_embedding("cpu"), *_step("cpu"), _CPU]
    parts += ["## Training from files", _REACH, *_reach("cuda"), *_reach("cpu")]
    parts += _behind_gpu()
    parts += _on_ssd()
    parts += _sharded()
    parts += _fleet()
    parts += _synchronised()
    parts += _predicted()
    if list(PICTURES.glob("growth-*.svg")):
        parts += ["## How cost grows", _GROWTH, *_growth("cuda"), *_growth("cpu")]
    return "\n\n".join([*parts, _YOURS]) + "\n"


_IN_SHORT = """In short, from the last result of each command; FBGEMM has the kernels of TorchRec. HugeCTR was not measured."""


_INTRODUCTION = """Figures are medians that the named command printed on the named machine; a ratio above 1 means that we are faster, and both
sides ran in that command, taking turns, on fresh ids each time. Each command says in its `--help` what exactly is timed.
`make peers` installs the peers on a CPU. The [log](log.md) has what was tried, and where a goal was missed."""

_CPU = """The EPYC of family 25, model 1 is one of the third generation, with AVX2 alone; model 17 and that without a number are of the fourth, with AVX-512 and BF16. All figures were taken while nothing else ran. Where other processes use the cores the ratios are far larger, since the peers then stall for up to seconds,
probably at barriers of OpenMP; such figures say more about the machine than about kernels, so none is given here. `train.precision: bf16` is for processors
with BF16 instructions, as AMD's EPYC has since its fourth generation and Intel's Xeon with AMX, and for GPUs. On others torch imitates it (10 to 30 times as slow as FP32 on the EPYC of the third generation, twice on the Xeon): there `rowstead train` multiplies in FP32 and says so."""

_GROWTH = """M1 with one thing changed at a time, and the limit that bandwidth, and for whole steps arithmetic, would set."""

_REACH = """Reading costs what the reading threads use of the processor (for a GPU batches are made straight in pinned memory). That cost per sample, times the samples per second that training could do on its own
(on a GPU by the time for which it is busy, on a CPU by the time spent not waiting), is the number of cores that would read fast enough. `rowstead train` works it
out at the end of every run and keeps it in `record.json` (`reader_cores_needed`); where training waited for data for a tenth of the time or more, and for half a second
at least, it says so. `samples/s` leaves out the first 10 steps of a process, in which kernels are compiled, once there are 20."""


_YOURS = """## On your machine

```sh
make peers
python -m benchmarks.embedding --device cpu --json
python -m benchmarks.step --device cpu --json
python -m benchmarks.reach --device cpu --json
python -m benchmarks.growth --device cpu --save
```

With a CUDA GPU, and FBGEMM for it, say `--device cuda`. `--quick` gives a first look, `--save` keeps the result under `benchmarks/results/`."""


_AS_CALLED = """Each side is called as its training loop calls it: ours copies ids into memory of its own and replays a CUDA graph,
as the steps of `rowstead train` do, and FBGEMM is called eagerly, as TorchRec does. The other columns have both in the same way."""


def _embedding(device: str) -> list[str]:
    parts = [part for result in tables.of_each_machine("embedding", device) for part in _embedding_on(result, device)]
    return ["### Embedding look-up and update", *parts] if parts else []


def _embedding_on(result: Mapping[str, Any], device: str) -> list[str]:
    """What one machine measured."""
    columns: list[Column] = [
        ("shape", tables.word("shape")),
        ("ours: look-up / + update, ms", tables.ms("rowstead_lookup_ms", "rowstead_both_ms")),
        ("FBGEMM", tables.ms("fbgemm_lookup_ms", "fbgemm_both_ms")),
        ("nn.EmbeddingBag + SGD", tables.ms("torch_lookup_ms", "torch_both_ms")),
    ]
    if device == "cuda":
        columns += [
            ("ours, eager", tables.ms("rowstead_eager_lookup_ms", "rowstead_eager_both_ms")),
            ("FBGEMM in a graph", tables.ms("fbgemm_graph_lookup_ms", "fbgemm_graph_both_ms")),
            ("ours, GPU's time alone", tables.ms("rowstead_lookup_device_ms", "rowstead_both_device_ms")),
            ("FBGEMM, GPU's time alone", tables.ms("fbgemm_lookup_device_ms", "fbgemm_both_device_ms")),
        ]
    columns.append(("look-up's share of the floor", tables.share("share_of_bandwidth_lookup")))
    ratios = tables.ratios(
        result["summary"],
        {
            "lookup_vs_fbgemm": "Look-up against FBGEMM",
            "lookup_update_vs_fbgemm": "Look-up + exact row-wise Adagrad against FBGEMM",
            "lookup_vs_fbgemm_eager": "Look-up, both eager",
            "lookup_update_vs_fbgemm_eager": "Look-up + update, both eager",
            "lookup_vs_fbgemm_graph": "Look-up, both in graphs",
            "lookup_update_vs_fbgemm_graph": "Look-up + update, both in graphs",
            "lookup_vs_fbgemm_device": "Look-up, the GPU's time alone",
            "lookup_update_vs_fbgemm_device": "Look-up + update, the GPU's time alone",
            "lookup_update_vs_torch": "Look-up + update against nn.EmbeddingBag with sparse gradients and SGD",
        },
    )
    explained = [_AS_CALLED] if device == "cuda" else []
    return [tables.where(result, "embedding", device), *explained, tables.table(columns, result["rows"]), ratios]


def _step(device: str) -> list[str]:
    parts = [part for result in tables.of_each_machine("step", device) for part in _step_on(result, device)]
    return ["### A whole training step", *parts] if parts else []


def _step_on(result: Mapping[str, Any], device: str) -> list[str]:
    """What one machine measured."""
    peers = {"fbgemm": "FBGEMM + torch.compile" if device == "cuda" else "FBGEMM", "fbgemm_eager": "FBGEMM, eager"}
    peers["torch"] = "nn.EmbeddingBag + SGD"
    rows = [row for row in result["rows"] if "fbgemm_ms" in row]
    columns: list[Column] = [
        ("model and batch", tables.model),
        ("ours, ms", tables.ms("rowstead_ms")),
        *((title, tables.ms(f"{peer}_ms")) for peer, title in peers.items() if f"{peer}_ms" in rows[0]),
        ("ours, samples/s", tables.number("samples_per_s")),
        ("share of the roofline", tables.share("share_of_roofline")),
    ]
    if "joules_per_1000_samples" in rows[0]:
        joules = ("joules_per_1000_samples", "fbgemm_joules_per_1000_samples")
        columns.append(("joules for 1,000 samples: ours / FBGEMM", tables.ms(*joules)))
    summary = result["summary"]
    ratios = [
        tables.ratios(summary, {"step_vs_fbgemm": "Against FBGEMM", "step_vs_torch": "Against nn.EmbeddingBag with SGD"}),
    ]
    if "step_vs_fbgemm_large_batch_geomean" in summary:
        ratios.append(
            f"- At the paper's batch sizes {summary['step_vs_fbgemm_paper_batch_min_m1_m2']:.2f} at least for M1 and M2, "
            f"{summary['step_vs_fbgemm_paper_batch_min_m3']:.2f} for M3\n"
            f"- At the large ones {summary['step_vs_fbgemm_large_batch_geomean']:.2f} in geometric mean, "
            f"{summary['step_vs_fbgemm_large_batch_min']:.2f} at least"
        )
    fp32_ms = {row["shape"]: row["rowstead_ms"] for row in result["rows"] if "fbgemm_ms" in row}
    others = [row for row in result["rows"] if "fbgemm_ms" not in row and row["rowstead_ms"] < fp32_ms[row["shape"]]]
    low = "; ".join(f"{row['shape']} {row['rowstead_ms']:.0f} ms" for row in others)
    tail = [f"Ours under `train.precision: bf16`: {low}."] if others else []
    return [tables.where(result, "step", device), tables.table(columns, rows), "\n".join(ratios), *tail]


def _reach(device: str) -> list[str]:
    """How much of the step's speed training from files has; nothing before it was measured."""
    result = tables.latest("reach", device)
    if result is None:
        return []
    columns: list[Column] = [
        ("model and batch", tables.model),
        ("`rowstead train`, samples/s", tables.number("train_samples_per_s")),
        ("the step alone", tables.number("step_samples_per_s")),
        ("share", tables.share("share_of_step")),
        ("waiting for data", lambda row: f"{100 * row['reading_held_up_share']:.0f} % of the time"),
        ("cores that read", lambda row: f"{row['reader_cores_used']:.1f} of {row['num_cores']}"),
        ("would be enough", tables.number("reader_cores_needed", ".1f")),
    ]
    told = [f"> {row['told']}" for row in result["rows"] if row["told"]]
    said = ["At the end of these runs it said:", "\n>\n".join(told)] if told else []
    return [tables.where(result, "reach", device), tables.table(columns, result["rows"]), *said]


def _behind_gpu() -> list[str]:
    """Steps with rows in system memory, beside those with all rows in GPU memory and FBGEMM's; nothing before it was measured."""
    result = tables.latest("cache", "cuda")
    if result is None:
        return []

    def took(name: str) -> Callable[[Row], str]:
        return tables.number(name, ".2f", may_lack=True)

    columns: list[Column] = [
        ("model, batch, ids", tables.word("shape")),
        ("`device`, ms", took("rowstead_device_ms")),
        ("`cached`, ms", took("rowstead_cached_ms")),
        ("`host`, ms", took("rowstead_host_ms")),
        ("FBGEMM's MANAGED_CACHING, ms", took("fbgemm_caching_ms")),
        ("FBGEMM's MANAGED, ms", took("fbgemm_managed_ms")),
        ("rows that came in", tables.number("rows_in_a_step")),
        ("bus time, ms", took("bus_ms")),
    ]
    says_what_stays = all("kept_share" in row for row in result["rows"])
    if says_what_stays:
        columns.append(("rows that stay", tables.share("kept_share")))
    summary = result["summary"]
    text = (
        "Whole training steps; 500,000 rows per table, a cache of a tenth of the rows, and none under `host` but those of batches under way. Ids are Criteo-like (1 % of the rows take 90 % of "
        "accesses), or drawn as `rows * u**3` (u3), where a batch names more rows than the cache has slots. Bus time is the larger of the bytes in and out "
        f"over the rate of a long copy ({summary['bus_in_bytes_per_s'] / 1e9:.0f} GB/s). With Criteo-like ids a cache reaches "
        f"{100 * summary['criteo_vs_device_min']:.0f} % of the throughput with all rows in GPU memory at least, and with u3 takes at most "
        f"{summary['u3_over_bus_time_max']:.1f} times the bus time. FBGEMM's cache has a tenth of the rows and, as its tables are by default, hears of no batch before it "
        "comes; ours hears of them early, and keeps more where batches under way need more at once."
        + ("" if says_what_stays else " One cache trained on both, and kept for u3 what it had decided for Criteo-like ids.")
    )
    return [
        "## Rows in system memory, trained by a GPU",
        text,
        tables.where(result, "cache", "cuda"),
        tables.table(columns, result["rows"]),
    ]


def _on_ssd() -> list[str]:
    """How near rows on SSD come to what the disk allows; nothing before it was measured."""
    result = tables.latest("cache", "cpu")
    if result is None:
        return []
    columns: list[Column] = [
        ("work", lambda row: {"tables": "look-up + update", "step": "whole step"}[str(row["work"])]),
        ("all rows in RAM, ms", tables.number("ram_ms", ".1f")),
        ("rows that the cache misses", tables.number("misses_a_step")),
        ("reading them, nothing else to do, ms", tables.number("disk_ms", ".1f")),
        ("rows on SSD, ms", tables.number("ssd_ms", ".1f")),
        ("of what is possible", tables.share("ssd_over_possible")),
        (
            "MB written, and cleaned",
            lambda row: f"{row['bytes_written_a_step'] / 1e6:.1f}, {row['bytes_cleaned_a_step'] / 1e6:.1f}",
        ),
    ]
    row = result["rows"][0]
    text = (
        f"M1 with {row['rows_a_table']:,} rows per table ({row['table_gb']:.1f} GB), a tenth of them cached in RAM, batches of 200, Criteo-like ids; "
        "direct I/O, so the page cache hides nothing. Possible is the lesser of the rates of RAM and of random reads, both measured beside it. "
        "Files are cleaned once they are full; where 0 MB were cleaned, the file was not full yet."
    )
    return ["## Rows on SSD", text, tables.where(result, "cache", "cpu"), tables.table(columns, result["rows"])]


def _sharded() -> list[str]:
    """What two processes send and how much of it is hidden; nothing before it was measured."""
    result = tables.latest("sharded", "cpu")
    if result is None:
        return []
    columns: list[Column] = [
        ("sharding", tables.word("sharding")),
        ("MB on the wire per step", tables.number("wire_bytes_per_step", ".2f", times=1e-6)),
        ("over the least possible", tables.number("wire_bytes_over_least", ".4f")),
        ("by the loopback interface", tables.number("loopback_bytes_per_step", ".2f", times=1e-6)),
        ("hidden share", tables.share("communication_hidden_share")),
        ("samples/s", tables.number("samples_per_s")),
    ]
    text = "Two processes, gloo over the loopback interface; [Several processes](distributed.md) has the formula of the least possible."
    return ["## Several processes", text, tables.where(result, "sharded"), tables.table(columns, result["rows"])]


def _fleet() -> list[str]:
    """What rows in another process cost, what a fleet costs, and Hogwild's second thread; nothing that was not measured."""
    parts: list[str] = []
    if (result := tables.latest("exchange", "cpu")) is not None:
        columns: list[Column] = [
            ("tables and batch", tables.word("shape")),
            ("remote, ms", tables.number("remote_s", ".2f", times=1e3)),
            ("kernels here, ms", tables.number("kernel_s", ".2f", times=1e3)),
            ("bare echo, ms", tables.number("echo_s", ".2f", times=1e3)),
            ("remote over both", tables.number("over_kernel_plus_echo", ".2f")),
            ("one right after another", tables.number("in_a_row_over_kernel_plus_echo", ".2f")),
            ("look-up p50, p99, ms", lambda row: f"{1e3 * row['latency_p50_s']:.2f}, {1e3 * row['latency_p99_s']:.2f}"),
            ("MB on the wire", tables.number("bytes_per_step", ".2f", times=1e-6)),
        ]
        text = (
            "Look-up and update of a batch with rows in sparse servers, against our kernels in one process plus a bare ZeroMQ echo of the same bytes: "
            "each by itself, after other memory has gone through the caches, as in a step; and as a ratio also one right after another."
        )
        parts += [text, tables.where(result, "exchange"), tables.table(columns, result["rows"])]
    if (result := tables.latest("fleet", "cpu")) is not None:
        summary = result["summary"]
        columns = [
            ("trained by", tables.word("who")),
            ("CPU s for 1,000 samples", tables.number("cpu_s_per_1000_samples", ".3f")),
            ("samples/s", tables.number("samples_per_s")),
        ]
        rows = [row for row in result["rows"] if "cpu_s_per_1000_samples" in row]
        text = (
            "M1 with 100,000 rows per table and batches of 200, from Parquet files: one process, and 2 trainers, 2 sparse servers, a dense server and a reader on the same "
            f"cores. The fleet uses {summary['cpu_s_per_1000_samples_over_one_process']:.2f} times the processor time of one process; its trainers wait for batches for "
            f"{100 * summary['trainers_wait_share']:.1f} % of the time, and find one ready {100 * summary['queue_nonempty_share']:.1f} % of the times that they want one."
        )
        parts += [text, tables.where(result, "fleet", "cpu"), tables.table(columns, rows)]
    if (result := tables.latest("fleet", "cuda")) is not None:
        columns = [
            ("tables in", tables.word("tables")),
            ("ms per step", tables.number("step_ms", ".1f")),
            ("samples/s", tables.number("samples_per_s")),
            ("cores of the servers", tables.number("server_cores", ".1f", may_lack=True)),
            ("GB/s on the wire", tables.number("wire_gb_per_s", ".2f", may_lack=True)),
            ("waiting for answers", tables.share("waiting_share", may_lack=True)),
        ]
        text = (
            "M3 with 100,000 rows per table and batches of 800, trained by a GPU: tables in its memory, and in two sparse servers on the CPU cores of its machine. The GPU is idle for nearly "
            "all of a remote step: what is left of it after waiting for answers is the trainer's one thread that splits batches and gradients for the servers and copies pooled vectors, and the servers pool and update on "
            "the cores that are given. So the bottleneck is the processors beside the GPU, not the bus, the wire or the GPU; by the study's figures a Big Basin that trained M3 had about 18 parameter servers beside it."
        )
        parts += [text, tables.where(result, "fleet", "cuda"), tables.table(columns, result["rows"])]
    if (result := tables.latest("hogwild", "cpu")) is not None:
        summary = result["summary"]
        threads: list[Column] = [
            ("trained by", tables.word("threads")),
            ("samples/s", tables.number("samples_per_s")),
        ]
        phases: list[Column] = [
            ("phase", tables.word("phase")),
            ("ms on a core", tables.number("cpu_ms", ".1f")),
            ("may hold the GIL", tables.share("lock_share")),
        ]
        text = f"Two Hogwild threads train {summary['hogwild_2_threads_speedup']:.2f} times as many samples per second as one."
        parts += [text, tables.where(result, "hogwild")]
        parts += [tables.table(threads, [row for row in result["rows"] if "threads" in row])]
        text = "How much of a step may hold the GIL, an upper bound: all time of a thread on a core except inside calls that release it."
        parts += [text, tables.table(phases, [row for row in result["rows"] if "phase" in row])]
    return ["## The fleet", *parts] if parts else []


def _synchronised() -> list[str]:
    """What asynchronous trainers cost in quality; nothing before that was measured."""
    result = tables.latest("synchronisation", "cpu")
    if result is None:
        return []
    rows = []
    for mode, num in dict.fromkeys((row["mode"], row["num"]) for row in result["rows"]):
        key, summary = f"{mode.replace(' ', '_')}_{num}_pct", result["summary"]
        rows.append(
            {"mode": mode, "num": num, "mean": summary[key], "low": summary[f"{key}_low"], "high": summary[f"{key}_high"]}
        )
    columns: list[Column] = [
        ("mode", tables.word("mode")),
        ("trainers or threads", tables.number("num")),
        ("NE above one process", tables.number("mean", "+.2f", unit=" %")),
        ("95 % interval", lambda row: f"{row['low']:+.2f} to {row['high']:+.2f} %"),
    ]
    text = (
        "The quickstart learned by 2 and 4 trainers in every mode of [synchronisation](synchronisation.md), with its defaults, and by 2 Hogwild threads, against one process on the same samples: mean over 5 seeds, scored by "
        "the probabilities of the log's own teacher."
    )
    return ["## Quality of asynchronous training", text, tables.where(result, "synchronisation"), tables.table(columns, rows)]


def _off_pct(ratios: Sequence[float]) -> float:
    """exp of the mean of |ln(ratio)|, minus 1, in per cent."""
    return 100 * math.expm1(statistics.fmean(abs(math.log(ratio)) for ratio in ratios))


def _predicted() -> list[str]:
    """How far predicted steps are from measured ones; nothing before that was measured."""
    parts: list[str] = []
    for device in ("cuda", "cpu"):
        if (result := tables.latest("prediction", device)) is None:
            continue
        summary = result["summary"]
        columns: list[Column] = [
            ("", tables.word("what")),
            ("error in geometric mean", tables.number("mean", ".1f", unit=" %")),
            ("largest", tables.number("most", ".0f", unit=" %")),
            ("between two measurements of the same model", tables.number("again", ".1f", unit=" %")),
        ]
        models = [row for row in result["rows"] if "ratio" in row]
        kinds = {"all models": models}
        if any(row.get("by") == "fleet" for row in models):
            kinds |= {f"those trained by a {by}": [row for row in models if row["by"] == by] for by in ("process", "fleet")}
        rows = []
        for what, some in kinds.items():
            for suffix in ("", "_at_pace") if device == "cpu" else ("",):
                ratios, again = ([row[f"{key}{suffix}"] for row in some] for key in ("ratio", "again"))
                off = {"mean": _off_pct(ratios), "most": max(_off_pct([ratio]) for ratio in ratios), "again": _off_pct(again)}
                rows.append(
                    {"what": what + (", at the speed that the machine had during calibration" if suffix else ""), **off}
                )
        text = (
            f"{summary['num_models']:.0f} random models that calibration had not seen; rank correlation of predicted and measured step times "
            f"{summary['rank_correlation']:.3f}."
        )
        if "best_placement_hit_share" in summary:
            text += (
                " Of models whose tables did not fit the memory that they were given, the placement that was predicted to be fastest was measured to be, or to be within "
                f"5 % of it, for {100 * summary['best_placement_hit_share']:.0f} %."
            )
            if "hit_share_by_chance" in summary:
                text += f" Chosen by chance, one would have been for {100 * summary['hit_share_by_chance']:.0f} %."
        parts += [text, tables.where(result, "prediction", device), tables.table(columns, rows)]
    return ["## Predicted against measured", *parts] if parts else []


def _growth(device: str) -> list[str]:
    """The pictures of one device; nothing before they were drawn."""
    pictures = sorted(PICTURES.glob(f"growth-{device}-*.svg"))
    if not pictures:
        return []
    shown = [f"![Samples per second, {picture.stem.split('-', 1)[1]}](pictures/{picture.name})" for picture in pictures]
    return [f"`python -m benchmarks.growth --device {device} --save` drew these:", *shown]
