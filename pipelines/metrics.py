"""Figures in Prometheus' text format 0.0.4, served by the standard library."""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pipelines.host_header import answers

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TIMEOUT_S = 5.0
PREFIX = "tandem_"

Rows = list[tuple[Mapping[str, str], float]]  # labels and value
Family = tuple[str, str, str, Rows]  # name without prefix, type, help


class Histogram:
    """Counts values by upper bounds, which rise; any thread may add."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.about = about
        self.bounds = tuple(bounds)
        self._lock = threading.Lock()
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        with self._lock:
            self._counts[bisect_left(self.bounds, value)] += times
            self._sum += value * times

    def read(self) -> tuple[list[int], float]:
        """Return how many values each bound took, last those above all, and the sum of all."""
        with self._lock:
            return list(self._counts), self._sum

    def lines(self) -> Iterable[str]:
        """Yield the lines of the text."""
        counts, total = self.read()
        name = f"{PREFIX}{self.name}"
        yield f"# HELP {name} {self.about}"
        yield f"# TYPE {name} histogram"
        for number, bound in enumerate((*map(_number, self.bounds), "+Inf"), 1):
            yield f'{name}_bucket{{le="{bound}"}} {sum(counts[:number])}'
        yield f"{name}_sum {_number(total)}"
        yield f"{name}_count {sum(counts)}"


@dataclass(frozen=True, slots=True)
class Figures:
    """What a process tells of itself at a moment. A family without rows is left out."""

    families: Sequence[Family]
    histograms: Sequence[Histogram] = ()


def render(figures: Figures, *, prefix: str = PREFIX) -> str:
    """Return figures as the text that Prometheus reads."""
    lines = [
        line
        for name, kind, about, rows in figures.families
        for line in _family(prefix + name, kind, about, rows)
    ]
    lines += [line for histogram in figures.histograms for line in histogram.lines()]
    return "\n".join(lines) + "\n"


class MetricsServer(ThreadingHTTPServer):
    """Answers GET /metrics with a text, each request in a thread of its own.

    `start` it, and `close` it.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], text: Callable[[], str]) -> None:
        """Listen on an address (host, port). OSError: it is taken, or not of this machine."""
        self.text = text
        super().__init__(address, _Handler)
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.server_address[1])

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = TIMEOUT_S

    def do_GET(self) -> None:
        """Answer /metrics."""
        assert isinstance(self.server, MetricsServer)
        if not answers(str(self.server.server_address[0]), self.headers.get("Host", "")):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "these figures are for this machine")
            return
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, "try /metrics")
            return
        body = self.server.text().encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing: a scrape every few seconds is not news."""


def _family(name: str, kind: str, about: str, rows: Rows) -> Iterable[str]:
    if not rows:
        return
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
    for labels, value in rows:
        text = ",".join(f'{key}="{_escaped(one)}"' for key, one in labels.items() if one)
        yield f"{name}{f'{{{text}}}' if text else ''} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    """Return a number with all its digits: counters grow beyond the six of `%g`."""
    return str(value) if isinstance(value, int) else f"{value:.9g}"
