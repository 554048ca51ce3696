"""What a collector gets over OTLP is what Prometheus reads, from the server and from the page."""

import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fleet_server_fixtures import device_row, report, wait_until, write_fleet
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from web_fixtures import Visitor, WebProcess, add_people

from pipelines.metrics import Figures, Histogram, render
from toolkit.errors import FleetError
from toolkit.fleet.brokers.local import free_port
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.server import otlp
from toolkit.fleet.server.serve import FleetServer
from toolkit.fleet.store.devices import save_devices

Sent = ExportMetricsServiceRequest


class Collector(ThreadingHTTPServer):
    """Takes metrics as a collector does, or refuses them with a status."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: queue.Queue[tuple[str, Sent]] = queue.Queue()
        self.status = 200
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def next(self) -> Sent:
        path, sent = self.requests.get(timeout=60.0)
        assert path == "/v1/metrics"
        return sent


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        assert self.headers["content-type"] == "application/x-protobuf"
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.put((self.path, Sent.FromString(body)))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(ExportMetricsServiceResponse().SerializeToString())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv(otlp.INTERVAL, "100")
    collector = Collector()
    yield collector
    collector.shutdown()
    collector.server_close()


def metrics_in(sent: Sent) -> dict[str, Metric]:
    (resource,) = sent.resource_metrics
    (scope,) = resource.scope_metrics
    return {metric.name: metric for metric in scope.metrics}


def text_of(sent: Sent) -> str:
    """What was sent, as Prometheus would have read it."""
    lines = []
    for metric in metrics_in(sent).values():
        kind = str(metric.WhichOneof("data"))
        kind = {"sum": "counter"}.get(kind, kind)
        lines += [f"# HELP {metric.name} {metric.description}", f"# TYPE {metric.name} {kind}"]
        if kind == "histogram":
            (point,) = metric.histogram.data_points
            bounds = [*(f"{bound:.9g}" for bound in point.explicit_bounds), "+Inf"]
            for n, bound in enumerate(bounds, 1):
                lines.append(f'{metric.name}_bucket{{le="{bound}"}} {sum(point.bucket_counts[:n])}')
            lines += [f"{metric.name}_sum {point.sum:.9g}", f"{metric.name}_count {point.count}"]
            continue
        for point in (metric.sum if kind == "counter" else metric.gauge).data_points:
            labels = ",".join(f'{row.key}="{row.value.string_value}"' for row in point.attributes)
            value = getattr(point, str(point.WhichOneof("value")))
            number = str(value) if isinstance(value, int) else f"{value:.9g}"
            lines.append(f"{metric.name}{f'{{{labels}}}' if labels else ''} {number}")
    return "\n".join(lines) + "\n"


def test_a_collector_gets_what_prometheus_reads(collector: Collector) -> None:
    seconds = Histogram("fleet_store_seconds", "A round.", (0.1, 1.0))
    seconds.observe(0.05, times=3)
    seconds.observe(7.0)
    families = [
        ("fleet_devices", "gauge", "Devices.", [({"state": "late", "site": ""}, 3), ({}, 0.5)]),
        ("fleet_events_total", "counter", "Messages.", [({"kind": "beat"}, 12_345_678)]),
        ("fleet_problems", "gauge", "None.", []),
    ]
    figures = Figures(families, (seconds,))
    expected = render(figures)
    push = otlp.OtlpPush(collector.url, "tandem-fleet-server", lambda: figures)
    push.start()
    try:
        sent = collector.next()
        seconds.observe(0.05)
        wait_until(lambda: text_of(collector.next()) == render(figures), lambda: "")
        again = collector.next()
    finally:
        push.close()
    assert text_of(sent) == expected
    metrics = metrics_in(again)
    assert metrics["tandem_fleet_events_total"].sum.is_monotonic
    cumulative = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    assert metrics["tandem_fleet_events_total"].sum.aggregation_temporality == cumulative
    (point,) = metrics["tandem_fleet_store_seconds"].histogram.data_points
    assert list(point.bucket_counts) == [4, 0, 1]
    assert not point.HasField("min")
    attributes = {
        row.key: row.value.string_value for row in again.resource_metrics[0].resource.attributes
    }
    assert attributes["service.name"] == "tandem-fleet-server"
    assert attributes["service.instance.id"]


def test_a_collector_that_refuses_is_said_once(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 400
    push = otlp.OtlpPush(collector.url, "tandem-fleet-server", lambda: Figures(()))
    push.start()
    for _ in range(4):
        collector.next()
    push.close()
    output = [row for row in caplog.records if row.name == "tandem.fleet" and row.levelno > 20]
    assert [row.getMessage() for row in output] == [
        f"the collector at {collector.url} does not take figures"
    ]


def test_figures_that_cannot_be_read_once_are_sent_later(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    reads = iter([RuntimeError("the store is away"), Figures(())])

    def read() -> Figures:
        figures = next(reads, Figures(()))
        if isinstance(figures, Exception):
            raise figures
        return figures

    push = otlp.OtlpPush(collector.url, "tandem-fleet-server", read)
    push.start()
    collector.next()
    push.close()
    assert "cannot be sent: the store is away" in caplog.text


def test_an_address_or_an_interval_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FleetError, match="'localhost:4318' is no collector: write http://"):
        otlp.OtlpPush("localhost:4318", "x", lambda: Figures(()))
    monkeypatch.setenv(otlp.INTERVAL, "soon")
    with pytest.raises(FleetError, match=f"{otlp.INTERVAL}='soon' is no number of milliseconds"):
        otlp.OtlpPush("http://localhost:4318", "x", lambda: Figures(()))


def test_without_the_option_nothing_of_it_is_loaded_and_without_the_extra_it_is_named() -> None:
    program = (
        "import sys, toolkit.fleet.server.serve, toolkit.fleet.web.serve\n"
        "from toolkit.fleet.server.otlp import OtlpPush\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
        "sys.modules['opentelemetry.sdk'] = None\n"
        "try: OtlpPush('http://x', 'x', None)\n"
        "except Exception as error: print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    loaded, output = done.stdout.splitlines()
    assert loaded == "[]"
    assert re.fullmatch(
        r".*--otlp`? needs opentelemetry\S*: \S+ -m pip install '.*\[otel\]'", output
    )


def test_a_server_sends_the_fleet(tmp_path: Path, collector: Collector) -> None:
    fleet = load_fleet(write_fleet(tmp_path, free_port()))
    database = fleet.open_store()
    with database.write():
        save_devices(database, [device_row("d0", report("a"))])
    database.close()
    stopped = threading.Event()
    server = FleetServer(fleet, services=(), otlp=collector.url)
    thread = threading.Thread(target=server.serve, args=(stopped,))
    thread.start()
    try:
        wait_until(lambda: "tandem_fleet_lease_holder 1\n" in text_of(collector.next()), lambda: "")
        text = text_of(collector.next())
    finally:
        stopped.set()
        thread.join(30.0)
    running = 'tandem_fleet_running_devices{release="app-a",version="1",profile="test-board"} 1\n'
    assert running in text
    assert 'tandem_fleet_devices{state="online"} 1\n' in text


def test_the_page_sends_its_requests(tmp_path: Path, collector: Collector) -> None:
    folder = write_fleet(tmp_path / "fleet", 1)
    add_people(folder)
    web = WebProcess(folder, "--otlp", collector.url)
    try:
        assert Visitor(web).get("/sign-in").status == 200
        wait_until(
            lambda: 'requests_total{kind="sign_in",code="200"} 1\n' in text_of(collector.next()),
            lambda: "",
        )
    finally:
        web.close()
