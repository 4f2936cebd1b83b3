"""The page of a log's statistics: complete, offline, and safe with any column name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from rowstead.report.describe import MAX_CURVES, charts, headline, number, page, share, tables
from rowstead.spec.statistics import QUANTILES, DenseStatistics, LogStatistics, SparseStatistics

DENSE = DenseStatistics(
    name="price",
    missing_share=0.25,
    infinite_share=0,
    mean=1.5,
    std=0.5,
    min=1,
    max=2,
    quantiles=tuple(map(float, range(len(QUANTILES)))),
)
NOTHING = DenseStatistics(name="gone", missing_share=1, infinite_share=0, mean=None, std=None, min=None, max=None)


def sparse(name: str = "s", *, longest: int = 3, **options: object) -> SparseStatistics:
    given = {
        "name": name, "num_accesses": 100, "num_distinct": 1234, "distinct_error": 0.0, "empty_share": 0.1, "length_mean": 1.25,
        "length_p50": 1, "length_p90": 2, "length_p99": 3, "length_max": longest, "length_bins": (0, 1, 2, 3),
        "length_shares": (0.1, 0.6, 0.2, 0.1), "top_1_percent_share": 0.3, "top_10_percent_share": 0.6, "skew_top": (0.01, 0.1, 1.0),
        "skew_accesses": (0.3, 0.6, 1.0), "num_rows": 1000, "expected_collisions": 0.7, "actual_collisions": 0.71,
    }  # fmt: skip
    return SparseStatistics(**{**given, **options})  # type: ignore[arg-type]


def log(*features: SparseStatistics, dense: tuple[DenseStatistics, ...] = (DENSE,)) -> LogStatistics:
    return LogStatistics(num_rows=5000, label_mean=0.2, num_rows_sampled=1000, dense=dense, sparse=features)


class Reader(HTMLParser):
    """Collects tags with their attributes, and the text outside of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] != "script":
            self.words.append(data)


def test_tables_hold_the_numbers() -> None:
    first, second = tables(log(sparse(), sparse("big", num_distinct=123_456_789, distinct_error=0.002, actual_collisions=None)))
    assert dict(zip(first.headings, first.rows[0], strict=True)) == {
        "feature": "s", "distinct ids": "1,234", "ids/example": "1.250", "p50": "1", "p90": "2", "p99": "3", "max": "3", "empty": "10.0 %",
        "top 1 %": "30.0 %", "top 10 %": "60.0 %", "hash size": "1,000", "collisions": "71.0 %", "expected": "70.0 %",
    }  # fmt: skip
    assert first.rows[1][1] == "~123,456,789 ± 0.2 %"
    assert first.rows[1][first.headings.index("collisions")] == ""
    assert second.rows == (("price", "1.500", "0.5000", "1", "0", "3", "6", "2", "25.0 %", "0 %"),)


def test_figures_without_a_value_are_empty_not_zero() -> None:
    (table,) = tables(log(dense=(NOTHING,)))
    assert table.rows[0] == ("gone", "", "", "", "", "", "", "", "100.0 %", "0 %")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0, "0"),
        (0.5, "0.5000"),
        (12.345, "12.35"),
        (123456.7, "123,457"),
        (1e-5, "1.000e-05"),
        (-2.5, "-2.500"),
        (1e12, "1.000e+12"),
    ],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


def test_a_small_share_is_not_shown_as_none() -> None:
    assert [share(value) for value in (None, 0.0, 1e-6, 0.5)] == ["", "0 %", "<0.1 %", "50.0 %"]


def test_charts_show_the_numbers() -> None:
    sizes, means, lengths, skew = charts(log(sparse("a", length_mean=2.0), sparse("b", num_rows=50, length_mean=8.0)))
    assert [trace["name"] for trace in sizes.traces] == ["distinct ids", "hash size"]
    assert sizes.traces[1]["y"] == [1000, 50]
    assert means.traces[0]["text"] == ["b", "a"]
    assert lengths.traces[0]["x"] == [1, 2, 3]
    assert lengths.traces[0]["y"] == pytest.approx([0.9, 0.3, 0.1])
    assert skew.traces[1]["y"] == [0.3, 0.6, 1.0]


def test_one_hash_size_for_all_is_a_line() -> None:
    sizes, *_ = charts(log(sparse("a"), sparse("b")))
    assert len(sizes.traces) == 1
    assert sizes.layout["shapes"][0]["y0"] == 1000


def test_features_with_one_id_have_no_length_distribution() -> None:
    titles = [chart.title for chart in charts(log(sparse(longest=1)))]
    assert "Length distribution" not in titles
    assert "Access skew" in titles


def test_only_the_most_accessed_of_many_features_get_curves() -> None:
    many = [sparse(f"f{i}", num_accesses=i) for i in range(MAX_CURVES + 10)]
    *_, skew = charts(log(*many))
    assert [trace["name"] for trace in skew.traces] == [f"f{i}" for i in range(10, MAX_CURVES + 10)]
    assert f"Only the {MAX_CURVES} features" in skew.words


def test_page_fetches_nothing() -> None:
    text = page(log(sparse()))
    found = Reader(text)
    policy = next(
        attributes["content"] for tag, attributes in found.tags if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    for tag, attributes in found.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert "Plotly" in text
    assert any(attributes.get("name") == "viewport" for _, attributes in found.tags)
    assert headline(log(sparse())) + "." in found.words


def test_names_of_columns_cannot_become_markup() -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    text = page(log(sparse(evil), sparse("b"), dense=(DENSE,)), title=evil)
    found = Reader(text)
    assert not [tag for tag, _ in found.tags if tag == "img"]
    assert evil in found.words
    data = re.search(r"const figures = (\[.*?\]);\n", text)
    assert data
    assert json.loads(data.group(1))[0]["data"][0]["text"][1] == "b"


def test_a_log_without_sparse_features_has_a_page_too() -> None:
    text = page(log(dense=(DENSE, NOTHING)))
    assert "price" in text
    assert "<script" not in text
    assert "a sample of 1,000 rows" in text


def test_no_torch_is_needed() -> None:
    program = "import sys, rowstead.report.describe; assert not {'torch', 'numba', 'plotly'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
