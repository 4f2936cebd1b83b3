"""The page's server: answers its own page, and refuses everybody else."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rowstead.records.events import EventLog
from rowstead.records.run_folder import RunFolder
from rowstead.records.store import RunStore, StoreEntry
from rowstead.spec.catalogue import load_machine
from rowstead.spec.errors import RowsteadError
from rowstead.spec.parse import parse, to_plain
from rowstead.spec.record import Record
from rowstead.spec.run import RunSpec, load_recipe
from rowstead.spec.yaml_text import read_text
from rowstead.ui import server
from rowstead.ui.browse import Browser
from rowstead.ui.server import FILES, MAX_BODY_BYTES, Ui, is_loopback
from rowstead.ui.worker import Workers

OURS = {"Content-Type": "application/json", "X-Rowstead": "1"}


class SharedWorkers(Workers):
    """One process for all tests, which they need not start again and again."""

    def close(self) -> None:
        """Stay open for the next test."""


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    shared = SharedWorkers("rowstead.ui.jobs", 1)
    yield shared
    Workers.close(shared)


@pytest.fixture
def ui(tmp_path: Path, workers: Workers) -> Iterator[Ui]:
    folder = RunFolder.create(tmp_path / "runs", "quickstart")
    folder.write_spec(load_recipe("quickstart"))
    folder.write_record(
        Record(
            kind="measured",
            name="quickstart",
            spec_digest="d",
            date="2026-11-15T12:00:00+00:00",
            figures={"samples_per_s": 5e4},
        )
    )
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "spec.yaml").write_text("secret: 1")
    page = Ui(runs=tmp_path / "runs", workers=workers, report_workers=workers)
    page.start()
    yield page
    page.close()


def ask(ui: Ui, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", ui.port, timeout=60)
    try:
        data = json.dumps(body) if body is not None and not isinstance(body, (bytes, str)) else body
        connection.request(method, path, data, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def post(ui: Ui, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
    status, data, _ = ask(ui, "POST", path, body, **{**OURS, **headers})
    return status, data


@pytest.mark.parametrize("path", FILES)
def test_the_page_and_its_parts_are_served_with_a_policy(ui: Ui, path: str) -> None:
    status, data, headers = ask(ui, "GET", path)
    assert status == 200
    assert data
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_the_page_holds_no_script_or_style_of_its_own(ui: Ui) -> None:
    text = ask(ui, "GET", "/")[1].decode()
    assert "<script>" not in text
    assert "style=" not in text
    assert " on" not in text.replace(" on ", "").replace(" one", "").replace(" only", "")


def test_a_scenario_is_answered_line_by_line(ui: Ui) -> None:
    status, data = post(ui, "/api/plan", {"scenario": {"machine": "h200"}, "base": None})
    assert status == 200
    lines = [json.loads(line) for line in data.splitlines()]
    assert lines[0]["fleet"]["machine"] == "h200"
    assert all("platform" in line for line in lines[1:])


def test_a_recipe_goes_round(ui: Ui) -> None:
    status, data = post(ui, "/api/recipe", {"name": "m2"})
    assert status == 200
    loaded = json.loads(data)
    status, data = post(ui, "/api/save", {"scenario": loaded["scenario"], "base": loaded["base"]})
    text = json.loads(data)["text"]
    assert parse(RunSpec, read_text(text, what="it")) == load_recipe("m2")
    status, data = post(ui, "/api/recipe", {"text": text})
    assert json.loads(data) == loaded


def test_runs_are_listed_planned_with_and_reported(ui: Ui) -> None:
    listing = json.loads(ask(ui, "GET", "/api/runs")[1])
    assert [run["name"] for run in listing["runs"]] == ["quickstart-001"]
    assert listing["runs"][0]["figures"]["samples_per_s"] == 5e4
    status, data = post(ui, "/api/recipe", {"run": "quickstart-001"})
    assert json.loads(data)["base"] == to_plain(load_recipe("quickstart"))
    status, data, headers = ask(ui, "GET", "/report/quickstart-001")
    assert status == 200
    assert b"quickstart-001" in data
    assert headers["Content-Security-Policy"].startswith("sandbox allow-scripts")
    assert "allow-same-origin" not in headers["Content-Security-Policy"]
    assert ask(ui, "GET", "/report")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../secret/spec.yaml",
        "/..%2f..%2fetc/passwd",
        "/app.js/../../server.py",
        "/report/../secret",
        "/report/..%2fsecret",
        "/report/%2e%2e%2fsecret",
        "/report//etc/passwd",
        "/report/quickstart-001%00",
        "/report/quickstart-001/../../secret",
        "/server.py",
        "/page/app.js",
        "//etc/passwd",
    ],
)
def test_no_path_leads_out(ui: Ui, path: str) -> None:
    status, data, _ = ask(ui, "GET", path)
    assert status in (400, 404)
    assert b"secret: 1" not in data
    assert b"root:" not in data
    assert post(ui, "/api/recipe", {"run": path.removeprefix("/report/")})[0] == 400
    assert post(ui, "/api/recipe", {"name": path.removeprefix("/report/")})[0] == 400


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1:1", "127.0.0.1.evil.example", "", "localhost"])
def test_another_host_name_is_refused(ui: Ui, host: str) -> None:
    assert ask(ui, "GET", "/", Host=host)[0] == 403
    assert post(ui, "/api/plan", {"scenario": {}}, Host=host)[0] == 403


def test_our_own_names_are_accepted(ui: Ui) -> None:
    for host in (f"127.0.0.1:{ui.port}", f"localhost:{ui.port}", f"LOCALHOST:{ui.port}"):
        assert ask(ui, "GET", "/", Host=host)[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/json"},
        {"X-Rowstead": "1", "Content-Type": "text/plain"},
        {"X-Rowstead": "1", "Content-Type": "application/x-www-form-urlencoded"},
        {**OURS, "Origin": "http://evil.example"},
        {**OURS, "Origin": "null"},
    ],
)
def test_a_page_of_another_site_cannot_ask_for_work(ui: Ui, headers: dict[str, str]) -> None:
    for path in ("/api/plan", "/api/recipe", "/api/save"):
        assert ask(ui, "POST", path, {"scenario": {}}, **headers)[0] == 403


@pytest.mark.parametrize("path", ["/report", "/report/quickstart-001", "/api/start", "/api/runs"])
def test_a_page_of_another_site_cannot_have_reports_made(ui: Ui, path: str) -> None:
    for elsewhere in ("cross-site", "same-site"):
        assert ask(ui, "GET", path, Sec_Fetch_Site=elsewhere)[0] == 403
    for ours in ("same-origin", "none"):
        assert ask(ui, "GET", path, Sec_Fetch_Site=ours)[0] == 200
    assert ask(ui, "GET", "/", Sec_Fetch_Site="cross-site")[0] == 200  # a link to the page itself may be anywhere


def test_no_method_gives_leave_to_other_sites(ui: Ui) -> None:
    status, _, headers = ask(ui, "OPTIONS", "/api/plan", Origin="http://evil.example", Access_Control_Request_Method="POST")
    assert status == 501
    assert not [name for name in headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize(
    "body",
    ["", "[]", "{", '"x"', '{"scenario": 5}', '{"scenario": {"num_sparse": 1e30}}', '{"scenario": {"machine": "../x"}}',
     '{"scenario": {"unknown": 1}}', '{"scenario": {}, "base": {"a": 1}}', '{"scenario": {}, "base": 7}', "[" * 5000],
)  # fmt: skip
def test_nonsense_is_answered_with_what_is_wrong(ui: Ui, body: str) -> None:
    status, data = post(ui, "/api/plan", body)
    assert status == 400
    assert json.loads(data)["error"]


def test_a_body_that_is_too_long_or_says_not_how_long_is_refused(ui: Ui) -> None:
    head = f"POST /api/plan HTTP/1.1\r\nHost: 127.0.0.1:{ui.port}\r\nX-Rowstead: 1\r\nContent-Type: application/json\r\n"
    for length in (f"Content-Length: {MAX_BODY_BYTES + 1}\r\n", ""):  # the answer comes before any of the body
        with socket.create_connection(("127.0.0.1", ui.port), timeout=30) as raw:
            raw.sendall(f"{head}{length}\r\n".encode())
            assert b" 400 " in raw.recv(4096).splitlines()[0]


def test_beyond_loopback_nothing_is_answered_without_the_token(tmp_path: Path) -> None:
    page = Ui(host="0.0.0.0", runs=tmp_path)
    page.start()
    try:
        assert page.token is not None
        assert len(page.token) >= 32
        assert page.token in page.address
        for path in ("/", "/app.js", "/api/start", "/report"):
            assert ask(page, "GET", path)[0] == 403
            assert ask(page, "GET", f"{path}?token=wrong")[0] == 403
            assert ask(page, "GET", path, Cookie=f"rowstead-token-{page.port}=wrong")[0] == 403
        assert post(page, "/api/plan", {"scenario": {}})[0] == 403
        status, _, headers = ask(page, "GET", f"/?token={page.token}")
        assert (status, headers["Location"]) == (303, "/")
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert ask(page, "GET", "/", Cookie=cookie.split(";")[0])[0] == 200
        assert ask(page, "GET", "/api/start", Authorization=f"Bearer {page.token}")[0] == 200
        assert post(page, "/api/plan", {"scenario": {}}, Cookie=cookie.split(";")[0])[0] == 200
    finally:
        page.close()


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("127.0.0.2", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("example", False),
    ],
)
def test_what_is_loopback(host: str, local: bool) -> None:
    assert is_loopback(host) == local


def test_a_port_that_is_taken_says_so(ui: Ui) -> None:
    with pytest.raises(RowsteadError, match="--port"):
        Ui(port=ui.port).listen()


def test_the_command_prints_its_address_serves_and_ends_quietly_with_ctrl_c(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "rowstead", "ui", "--port", "0", "--no-open", "--runs", str(tmp_path)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        assert "Ctrl-C" in process.stdout.readline()
        connection = http.client.HTTPConnection(address.removeprefix("http://").strip("/"), timeout=60)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        _, wrong = process.communicate(timeout=60)
    assert process.returncode == 0
    assert wrong == ""


def test_two_pages_of_one_host_keep_their_tokens_apart(tmp_path: Path) -> None:
    pages = [Ui(host="0.0.0.0", runs=tmp_path) for _ in range(2)]
    cookies = []
    try:
        for page in pages:
            page.start()
            cookies.append(ask(page, "GET", f"/?token={page.token}")[2]["Set-Cookie"].split(";")[0])
        both = "; ".join(cookies)  # a browser sends the cookies of all ports of a host
        assert [ask(page, "GET", "/", Cookie=both)[0] for page in pages] == [200, 200]
        assert ask(pages[0], "GET", "/", Cookie=cookies[1])[0] == 403
    finally:
        for page in pages:
            page.close()


def test_a_token_can_be_asked_for_on_this_machine_too(tmp_path: Path) -> None:
    page = Ui(runs=tmp_path, token="secret of mine")
    page.start()
    try:
        assert ask(page, "GET", "/api/runs")[0] == 403
        assert ask(page, "GET", "/api/runs", Authorization="Bearer secret of mine")[0] == 200
        assert ask(page, "GET", "/api/runs", Authorization="Bearer secret of mine", Host="evil.example")[0] == 403
    finally:
        page.close()


@pytest.mark.parametrize("path", ["//[", "http://[::1", "/?" + "&".join(["token=x"] * 50)])
def test_an_address_that_is_none_is_answered(ui: Ui, path: str, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(("127.0.0.1", ui.port), timeout=30) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{ui.port}\r\n\r\n".encode())
        assert raw.recv(4096).split()[1] in (b"200", b"400", b"404")
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("length", ["\u00b2", "9" * 5000, "-1", "1e3"])
def test_a_length_that_is_no_number_is_refused(ui: Ui, length: str, capfd: pytest.CaptureFixture[str]) -> None:
    head = f"POST /api/plan HTTP/1.1\r\nHost: 127.0.0.1:{ui.port}\r\nX-Rowstead: 1\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", ui.port), timeout=30) as raw:
        raw.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode("latin-1"))
        assert b" 400 " in raw.recv(4096).splitlines()[0]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "record", ['{"kind": "measured"', '{"figures": "ne"}', "[]", '{"figures": {"ne": NaN}}', "[" * 100_000]
)
def test_one_record_that_cannot_be_read_does_not_hide_the_others(ui: Ui, record: str) -> None:
    broken = RunFolder.create(ui.runs, "broken")
    broken.write_spec(load_recipe("quickstart"))
    broken.record_file.write_text(record)
    status, data, _ = ask(ui, "GET", "/api/runs")
    assert status == 200
    listed = {run["name"]: run for run in json.loads(data, parse_constant=lambda word: pytest.fail(word))["runs"]}
    assert "cannot be read" in listed["broken-001"]["error"]
    assert listed["quickstart-001"]["figures"]["samples_per_s"] == 5e4


def test_studies_are_listed_where_there_are_no_runs(tmp_path: Path) -> None:
    record = Record(kind="measured", name="n", spec_digest="d", date="2026-11-15", figures={"samples_per_s": 1.0})
    RunStore(tmp_path).add(StoreEntry(record=record, source="sweep", study="widths", point="p", axes={"x": 1}))
    page = Ui(runs=tmp_path)
    page.start()
    try:
        listing = json.loads(ask(page, "GET", "/api/runs")[1])
        expected = {"name": "widths", "kind": "sweep", "num_measured": 1, "num_predicted": 0, "num_failed": 0}
        assert (listing["num_runs"], listing["studies"]) == (0, [expected])
        assert ask(page, "GET", "/report")[0] == 200
    finally:
        page.close()


def test_a_broken_measurement_of_this_machine_does_not_end_the_page(
    ui: Ui, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text("name: here\nhost: 7\n")
    monkeypatch.setenv("ROWSTEAD_MACHINE", str(file))
    start = json.loads(ask(ui, "GET", "/api/start")[1])
    assert "here" not in [machine["name"] for machine in start["machines"]]
    assert start["left_out"].startswith("machine.yaml: ")
    status, data = post(ui, "/api/plan", {"scenario": {}})
    assert status == 200
    assert len(data.splitlines()) > 8


def test_runs_are_compared_with_the_settings_that_differ(ui: Ui) -> None:
    for seed, ne in ((1, 0.8), (2, 0.7)):
        folder = RunFolder.create(ui.runs, "compared")
        folder.write_spec(load_recipe("quickstart", [f"data.synth.seed={seed}"]))
        with closing(EventLog(folder.events_file)) as events:
            for step in (10, 20):
                events.write("evaluation", step=step, ne=ne)
        record = Record(kind="measured", name="c", spec_digest="d", date="2026-11-15T12:00:00+00:00", figures={"ne": ne})
        folder.write_record(record)
    status, data = post(ui, "/api/compare", {"runs": ["compared-001", "compared-002"]})
    assert status == 200
    found = json.loads(data)
    assert found["settings"] == [{"name": "data.synth.seed", "values": ["1", "2"]}]
    assert [run["figures"]["ne"] for run in found["runs"]] == [0.8, 0.7]
    assert found["runs"][1]["curve"] == [[10 * 2048, 0.7], [20 * 2048, 0.7]]
    for _ in range(3):  # a worker has as much memory for the next comparison as for the first
        assert post(ui, "/api/compare", {"runs": ["compared-001", "compared-002"]})[0] == 200
    for names in (["compared-001"], ["../compared-001", "compared-002"], "compared-001", [1, 2], ["compared-001"] * 7):
        assert post(ui, "/api/compare", {"runs": names})[0] == 400


def test_the_page_starts_on_this_machine_with_the_newest_run(ui: Ui, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(server, "known_machines", lambda: ["laptop"])
    assert server.start_facts(Browser(tmp_path, ui.workers))["scenario"]["machine"] == "dgx-h100"
    monkeypatch.setattr(server, "known_machines", lambda: ["here", "laptop"])
    monkeypatch.setattr(server, "known", lambda name: load_machine("laptop"))
    for name in ("older", "newer"):
        RunFolder.create(tmp_path, name).write_spec(load_recipe("quickstart"))
    facts = server.start_facts(Browser(tmp_path, ui.workers))
    assert facts["scenario"]["machine"] == "here"
    assert (facts["runs"][0], facts["is_training"]) == ("newer-001", False)
