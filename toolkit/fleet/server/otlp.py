"""Figures for an OpenTelemetry collector, OTLP over HTTP (`--otlp http://127.0.0.1:4318`): those
that Prometheus reads, by the same names.

The exporter is OpenTelemetry's own (extra `otel`) and follows its environment variables, such as
OTEL_EXPORTER_OTLP_HEADERS, OTEL_METRIC_EXPORT_INTERVAL (ms) and OTEL_RESOURCE_ATTRIBUTES.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING

from pipelines.metrics import PREFIX, Family, Figures, Histogram
from toolkit.errors import FleetError
from toolkit.fleet.store import lease

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import export
    from opentelemetry.sdk.resources import Resource

LOG = logging.getLogger("tandem.fleet")
INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
INTERVAL_MS = "60000"


class OtlpPush:
    """Sends the figures of a process to a collector, again and again."""

    def __init__(self, url: str, service: str, read: Callable[[], Figures]) -> None:
        """`service`: the name of the process. Raises FleetError: the extra is missing, or the
        address or the interval is none."""
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.resources import Resource
        except ModuleNotFoundError as error:
            raise FleetError(
                f"--otlp needs {error.name}: {sys.executable} -m pip install 'tandem-edge[otel]'"
            ) from error
        if not url.startswith(("http://", "https://")):
            raise FleetError(
                f"{url!r} is no collector: write http://HOST:PORT, port 4318 as a rule"
            )
        self._interval_s, self._url, self._read = _interval_s(), url, read
        self._exporter = OTLPMetricExporter(endpoint=f"{url.rstrip('/')}/v1/metrics")
        self._resource = Resource.create(
            {
                "service.name": service,
                "service.version": version("tandem-edge"),
                "service.instance.id": lease.holder_name(),
            }
        )
        self._begun_ns = time.time_ns()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        LOG.info("sends figures to %s every %g s", self._url, self._interval_s)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._stopped.set()
        self._exporter.shutdown()
        self._thread.join(5.0)

    def _run(self) -> None:
        from opentelemetry.sdk.metrics.export import MetricExportResult

        failed = False
        while not self._stopped.is_set():
            was_failed, failed = failed, True
            try:
                figures = metrics_data(self._read(), self._resource, self._begun_ns)
                failed = self._exporter.export(figures) is MetricExportResult.FAILURE
                why = f"the collector at {self._url} does not take figures"
            except Exception as error:  # noqa: BLE001  (a store that hangs, a collector's answer)
                why = f"the figures for {self._url} cannot be sent: {error}"
            if failed and not was_failed and not self._stopped.is_set():
                LOG.warning("%s", why)
            self._stopped.wait(self._interval_s)


def _interval_s() -> float:
    text = os.environ.get(INTERVAL, INTERVAL_MS)
    try:
        return max(0.01, float(text) / 1e3)
    except ValueError as error:
        raise FleetError(f"{INTERVAL}={text!r} is no number of milliseconds") from error


def metrics_data(figures: Figures, resource: "Resource", begun_ns: int) -> "export.MetricsData":
    """Return figures as OpenTelemetry has them; `begun_ns`: since when is counted."""
    from opentelemetry.sdk.metrics import export
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    now_ns = time.time_ns()
    metrics = [_family(family, begun_ns, now_ns) for family in figures.families if family[3]]
    metrics += [_histogram(histogram, begun_ns, now_ns) for histogram in figures.histograms]
    scope = InstrumentationScope("tandem.fleet", version("tandem-edge"))
    scoped = export.ScopeMetrics(scope, metrics, "")
    return export.MetricsData([export.ResourceMetrics(resource, [scoped], "")])


def _family(family: Family, begun_ns: int, now_ns: int) -> "export.Metric":
    from opentelemetry.sdk.metrics import export

    name, kind, about, rows = family
    points = [
        export.NumberDataPoint(
            {key: text for key, text in labels.items() if text}, begun_ns, now_ns, value
        )
        for labels, value in rows
    ]
    data: export.Sum | export.Gauge = export.Gauge(points)
    if kind == "counter":
        data = export.Sum(points, export.AggregationTemporality.CUMULATIVE, is_monotonic=True)
    return export.Metric(f"{PREFIX}{name}", about, "", data)


def _histogram(histogram: Histogram, begun_ns: int, now_ns: int) -> "export.Metric":
    from opentelemetry.sdk.metrics import export

    counts, total = histogram.read()
    point = export.HistogramDataPoint(
        {}, begun_ns, now_ns, sum(counts), total, counts, histogram.bounds,
        None, None,  # type: ignore[arg-type]  # the least and the largest may be left out
    )  # fmt: skip
    data = export.Histogram([point], export.AggregationTemporality.CUMULATIVE)
    return export.Metric(f"{PREFIX}{histogram.name}", histogram.about, "", data)
