"""Figures in Prometheus' text format 0.0.4, served by the standard library."""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pipelines.host_header import answers

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TIMEOUT_S = 5.0

Rows = list[tuple[Mapping[str, str], float]]  # labels and value
Family = tuple[str, str, str, Rows]  # name without prefix, type, help


class Histogram:
    """Counts values by upper bounds, which rise; any thread may add."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._about = about
        self._bounds = tuple(bounds)
        self._lock = threading.Lock()
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += times
            self._sum += value * times

    def lines(self) -> Iterable[str]:
        """Yield the lines of the text."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        name = f"tandem_{self._name}"
        yield f"# HELP {name} {self._about}"
        yield f"# TYPE {name} histogram"
        for number, bound in enumerate((*map(_number, self._bounds), "+Inf"), 1):
            yield f'{name}_bucket{{le="{bound}"}} {sum(counts[:number])}'
        yield f"{name}_sum {_number(total)}"
        yield f"{name}_count {sum(counts)}"


def render(
    families: Iterable[Family], histograms: Iterable[Histogram] = (), *, prefix: str = "tandem_"
) -> str:
    """Return the text of all figures; a family without rows is left out."""
    lines = [
        line
        for name, kind, about, rows in families
        for line in _family(prefix + name, kind, about, rows)
    ]
    lines += [line for histogram in histograms for line in histogram.lines()]
    return "\n".join(lines) + "\n"


class MetricsServer(ThreadingHTTPServer):
    """Answers GET /metrics with a text, each request in a thread of its own."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], text: Callable[[], str]) -> None:
        """Listen on an address (host, port). OSError: it is taken, or not of this machine."""
        self.text = text
        super().__init__(address, _Handler)


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
