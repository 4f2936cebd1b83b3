"""Serves the what-if page on loopback, or elsewhere with a token; it writes no files and takes no paths from requests.

Pages of other sites cannot use it: requests must have this server's address as their Host (against DNS rebinding), POST requests must
carry a header that other sites may not send, and responses must not be framed.
"""

from __future__ import annotations

import contextlib
import hmac
import http.server
import ipaddress
import json
import secrets
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from rowstead.spec.catalogue import HERE
from rowstead.spec.errors import RowsteadError
from rowstead.spec.interactions import INTERACTIONS
from rowstead.spec.parse import to_plain
from rowstead.spec.row_optimizers import ROW_OPTIMIZERS
from rowstead.spec.run import RECIPES, recipe_names
from rowstead.spec.stores import IN_PLANS, STORES
from rowstead.ui.browse import Browser
from rowstead.ui.live import LiveRuns
from rowstead.ui.scenario import Scenario
from rowstead.ui.whatif import known, known_machines, trouble_here
from rowstead.ui.worker import BusyError, WorkerError, Workers

PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/common.js": ("common.js", "text/javascript; charset=utf-8"),
    "/runs.js": ("runs.js", "text/javascript; charset=utf-8"),
    "/app.css": ("app.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
MAX_BODY_BYTES = 1 << 20
"""Limit on a request; a recipe is far smaller."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
REPORT_POLICY = (
    # a report has inline scripts; in a sandbox with an opaque origin they cannot send requests to this server
    "sandbox allow-scripts allow-downloads allow-modals; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
COOKIE = "rowstead-token"
"""Prefix of the cookie's name; the port follows, since browsers send cookies to all ports of a host."""
ASKED = "X-Rowstead"
"""Header of every POST request; pages of other sites cannot send it without CORS permission, which is never given."""


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Decides which requests are allowed."""

    hosts: frozenset[str]
    """Allowed Host headers, with the port; empty where the token decides instead."""
    token: str | None = None
    cookie: str = COOKIE
    """Name of the cookie that holds the token."""

    def refusal(self, headers: Any, query: str) -> str | None:
        """Why a request is refused; None if it is allowed."""
        host = (headers.get("Host") or "").lower()
        if self.hosts and host not in self.hosts:
            return "use the address that the command printed"
        if self.token is not None and not any(_same(one, self.token) for one in _tokens(headers, query, self.cookie)):
            return "token missing or wrong: open the address that the command printed"
        return None

    def refusal_of_reading(self, headers: Any) -> str | None:
        """Why a GET request for data is refused: it must not come from a page of another origin."""
        if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return "only this server's own page may request this"
        return None

    def refusal_of_work(self, headers: Any) -> str | None:
        """Why a POST request is refused: it must come from our own page."""
        if headers.get(ASKED) is None or headers.get_content_type() != "application/json":
            return "only this server's own page may request this"
        origin, host = headers.get("Origin"), (headers.get("Host") or "").lower()
        if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
            return "only this server's own page may request this"
        return None


def _tokens(headers: Any, query: str, cookie: str) -> Iterator[str]:
    """The tokens of a request: query parameter, cookie and bearer."""
    with contextlib.suppress(ValueError):  # too many fields
        yield from parse_qs(query, max_num_fields=16).get("token", [])
    with contextlib.suppress(CookieError):
        found = SimpleCookie(headers.get("Cookie", "")).get(cookie)
        if found is not None:
            yield found.value
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield given.strip()


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


class _Server(http.server.ThreadingHTTPServer):
    """Ignores clients that disconnect before they have their response."""

    daemon_threads = True
    request_queue_size = 256  # connections that wait to be accepted

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@dataclass(kw_only=True)
class Ui:
    """One running server of the page."""

    host: str = "127.0.0.1"
    port: int = 0
    runs: Path = Path("runs")
    token: str | None = None
    """Required with every request; generated when left out, unless the address is loopback."""
    workers: Workers = field(default_factory=lambda: Workers("rowstead.ui.jobs"))
    """Processes that predict and read recipes."""
    report_workers: Workers = field(default_factory=lambda: Workers("rowstead.ui.jobs"))
    """Processes that draw reports, which take longer."""
    _server: http.server.ThreadingHTTPServer | None = field(default=None, init=False)

    def start(self) -> str:
        """Listen in the background and return the address to open."""
        server = self.listen()
        threading.Thread(target=server.serve_forever, args=(0.1,), name="rowstead-ui", daemon=True).start()
        return self.address

    def listen(self) -> http.server.ThreadingHTTPServer:
        """Bind the port."""
        local = is_loopback(self.host)
        if not local and self.token is None:
            self.token = new_token()
        parts = {"ui": self, "browser": Browser(self.runs, self.report_workers), "live": LiveRuns(self.runs)}
        handler = type("Handler", (_Handler,), parts)
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        kind = type("_FamilyServer", (_Server,), {"address_family": family})
        try:
            self._server = kind((self.host, self.port), handler)
        except OSError as error:
            where = f"{self.host}:{self.port}"
            raise RowsteadError(f"cannot listen on {where}: {error.strerror or error}; choose another --port") from None
        assert self._server is not None
        self.port = self._server.server_address[1]
        names = ("127.0.0.1", "localhost", "[::1]", self._shown_host) if local else ()
        hosts = frozenset(f"{name}:{self.port}" for name in names)
        self.guard = Guard(hosts=hosts, token=self.token, cookie=f"{COOKIE}-{self.port}")
        return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        self.workers.close()
        self.report_workers.close()

    @property
    def _shown_host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def address(self) -> str:
        """The URL to open."""
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self._shown_host
        return f"http://{host}:{self.port}/" + (f"?token={self.token}" if self.token else "")


def new_token() -> str:
    """A random token."""
    return secrets.token_urlsafe(24)


class _Handler(http.server.BaseHTTPRequestHandler):
    ui: Ui
    browser: Browser
    live: LiveRuns
    protocol_version = "HTTP/1.1"
    server_version = "rowstead"
    sys_version = ""
    timeout = 60  # of an idle connection
    _begun = False
    """Whether a streamed response has begun."""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, *_: object) -> None:
        """Log nothing, so that the address stays visible in the terminal."""

    def _answer(self, work: Callable[[str, str], None]) -> None:
        self._begun = False
        try:
            try:
                address = urlsplit(self.path)
            except ValueError:
                raise RowsteadError("malformed address") from None
            refusal = self.ui.guard.refusal(self.headers, address.query)
            if refusal is not None:
                self._refuse(403, refusal)
                return
            work(unquote(address.path), address.query)
        except BusyError as error:
            self._refuse(503, str(error))
        except RowsteadError as error:
            self._refuse(400, str(error))
        except RecursionError:
            self._refuse(400, "the request is nested too deeply")
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True  # the page cancelled the request
        except Exception as error:  # a bug: the traceback goes to the terminal
            if not isinstance(error, WorkerError):
                traceback.print_exc()
            self._refuse(500, "internal error: see the server's terminal")

    def _get(self, path: str, query: str) -> None:
        if self.ui.token is not None and path == "/" and "token=" in query:
            self.send_response(303)  # so that the token does not stay in the address
            self.send_header("Location", "/")
            self.send_header("Set-Cookie", f"{self.ui.guard.cookie}={self.ui.token}; HttpOnly; SameSite=Strict; Path=/")
            self._end(b"")
        elif path in FILES:
            name, kind = FILES[path]
            self._send(200, (PAGE / name).read_bytes(), kind)
        elif (refusal := self.ui.guard.refusal_of_reading(self.headers)) is not None:
            self._refuse(403, refusal)
        elif path == "/api/start":
            self._json(start_facts(self.browser))
        elif path == "/api/runs":
            self._json(self.browser.listing())
        elif path == "/api/live":
            self._json(self.live.listing())
        elif path == "/report" or path.startswith("/report/"):
            name = path.removeprefix("/report").removeprefix("/")
            self._send(200, self.browser.report(name or None), "text/html; charset=utf-8", policy=REPORT_POLICY)
        else:
            self._refuse(404, "not found")

    def _post(self, path: str, query: str) -> None:
        refusal = self.ui.guard.refusal_of_work(self.headers)
        if refusal is not None:
            self._refuse(403, refusal)
            return
        request = self._body()
        workers, base = self.ui.workers, request.get("base")
        if path == "/api/plan":
            with contextlib.closing(workers.run("plan", scenario=request.get("scenario"), base=base)) as lines:
                self._stream(lines)
        elif path == "/api/save":
            self._json(*workers.run("save", scenario=request.get("scenario"), base=base))
        elif path == "/api/compare":
            folders = self.browser.chosen(request.get("runs"))
            self._json(*self.ui.report_workers.run("compare", folders=[str(folder.path) for folder in folders]))
        elif path == "/api/recipe":
            folder = str(self.browser.run(name).path) if isinstance(name := request.get("run"), str) else None
            self._json(*workers.run("recipe", name=request.get("name"), folder=folder, text=request.get("text")))
        else:
            self._refuse(404, "not found")

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        plain = length.isascii() and length.isdigit() and len(length) < 16
        if not plain or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            raise RowsteadError(f"a request needs a Content-Length of at most {MAX_BODY_BYTES:,} bytes")
        try:
            request = json.loads(self.rfile.read(int(length)))
        except ValueError:
            raise RowsteadError("the request is not JSON") from None
        if not isinstance(request, dict):
            raise RowsteadError("the request is not a JSON object")
        return request

    def _stream(self, lines: Iterator[dict[str, Any]]) -> None:
        """Stream JSON lines as they are computed; an error becomes the last line."""
        first = next(lines)  # an invalid scenario raises here, before the response begins
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self._common()
        self.end_headers()
        self._begun = True
        self._chunk(first)
        for line in lines:
            self._chunk(line)
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, line: dict[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def _json(self, plain: Any) -> None:
        self._send(200, json.dumps(plain).encode(), "application/json")

    def _refuse(self, status: int, why: str) -> None:
        self.close_connection = True
        if self._begun:  # the status has been sent, so the error becomes the last line
            self._chunk({"error": why})
            self.wfile.write(b"0\r\n\r\n")
        else:
            self._send(status, json.dumps({"error": why}).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str, *, policy: str = POLICY) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self._end(body, policy=policy)

    def _end(self, body: bytes, *, policy: str = POLICY) -> None:
        self.send_header("Content-Length", str(len(body)))
        self._common(policy)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _common(self, policy: str = POLICY) -> None:
        for name, value in (
            ("Content-Security-Policy", policy),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cross-Origin-Opener-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)


def start_facts(browser: Browser) -> dict[str, Any]:
    """What the page needs to start: on this machine, if it was calibrated, with the recipe of the newest run."""
    machines = known_machines()
    return {
        "recipes": [{"name": name, "about": _about(name)} for name in recipe_names()],
        "machines": _titles({name: known(name) for name in machines}),
        "placements": _titles({name: STORES[name] for name in IN_PLANS}),
        "row_optimizers": _titles(ROW_OPTIMIZERS),
        "interactions": _titles(INTERACTIONS),
        "scenario": to_plain(Scenario(machine=HERE) if HERE in machines else Scenario()),
        "left_out": trouble_here(),
        "runs": browser.names(),
        "is_training": bool(browser.num_training()),
    }


def _titles(entries: Mapping[Any, Any]) -> list[dict[str, str]]:
    return [{"name": name, "title": entry.title} for name, entry in entries.items()]


def _about(name: str) -> str:
    return (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
