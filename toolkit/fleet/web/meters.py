"""What the site counts and times of itself, for Prometheus and OpenTelemetry."""

import time
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipelines.metrics import Family, Figures, Histogram, Rows
from toolkit.fleet.server.metrics import BOUNDS_S, build_family

# Beginning of a path -> the kind of its requests; the first row counts. Others are of a page.
KINDS: tuple[tuple[str, str], ...] = (
    ("/live", "live"),
    ("/api/v1/events", "live"),
    ("/api/", "api"),
    ("/static/", "static"),
    ("/sign-in", "sign_in"),
    ("/metrics", "metrics"),
)
SIGN_IN = ("POST", "sign_in")


class Meters:
    """What the site counts and times. The thread of its loop adds, any thread reads."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str]] = Counter()  # kind and status
        self._refused = 0
        self._seconds = Histogram(
            "fleet_web_request_seconds", "From a request until its answer begins.", BOUNDS_S
        )

    def count(self, method: str, path: str, status: int, took_s: float) -> None:
        """Count a request that is answered."""
        kind = next((kind for begin, kind in KINDS if path.startswith(begin)), "page")
        self._requests[kind, str(status)] += 1
        self._refused += (method, kind) == SIGN_IN and status >= 400
        self._seconds.observe(took_s)

    def read(self, viewers: int, changed_s: float) -> Figures:
        """Return all figures. `viewers`: streams that are open; `changed_s`: the time at which the
        store was seen to change."""
        requests: Rows = [
            ({"kind": kind, "code": code}, count)
            for (kind, code), count in sorted(self._requests.copy().items())
        ]
        families: list[Family] = [
            build_family(),
            ("fleet_web_requests_total", "counter", "Requests that were answered.", requests),
            ("fleet_web_viewers", "gauge", "Streams of live events.", [({}, viewers)]),
            (
                "fleet_web_sign_ins_refused_total", "counter",
                "Attempts to sign in that failed or came too often.", [({}, self._refused)],
            ),
            (
                "fleet_web_last_change_timestamp_seconds", "gauge",
                "When the store was last seen to change; in the beginning: the start.",
                [({}, int(changed_s))],
            ),
        ]  # fmt: skip
        return Figures(families, (self._seconds,))


class MetersMiddleware:
    """Counts and times each request until its answer begins: that of a stream ends late."""

    def __init__(self, app: ASGIApp, *, meters: Meters) -> None:
        self._app = app
        self._meters = meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        begun_s, is_counted = time.perf_counter(), scope["type"] != "http"

        def count(status: int) -> None:
            nonlocal is_counted
            if not is_counted:
                is_counted = True
                took_s = time.perf_counter() - begun_s
                self._meters.count(scope["method"], scope["path"], status, took_s)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                count(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            count(500)  # answered by who is outside
            raise
