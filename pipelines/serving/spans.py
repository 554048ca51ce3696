"""Spans of inferences for an OpenTelemetry collector, OTLP over HTTP; below the client's own.

The exporter is OpenTelemetry's (extra `otel`) and follows its environment variables, such as
OTEL_EXPORTER_OTLP_HEADERS and OTEL_TRACES_SAMPLER.
"""

from contextlib import AbstractContextManager
from importlib.metadata import version

from device.closing import Closing
from device.errors import ConfigError
from device.install_advice import pip_install
from pipelines.serving.protocol import InferRequest


class Spans(Closing):
    """Makes spans and sends them in a thread of its own."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError: the extra is missing, or the address is none."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"`tandem serve --otlp` needs {error.name}: {pip_install('otel')}"
            ) from error
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{url!r} is no collector: write http://HOST:PORT, port 4318 as a rule."
            )
        names = {"service.name": "tandem-serve", "service.version": version("tandem-edge")}
        self._provider = TracerProvider(resource=Resource.create(names))
        exporter = OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tandem.serve", names["service.version"])

    def span(self, request: InferRequest) -> AbstractContextManager[object]:
        """Return the span of an inference, for a `with` block; a refusal marks it as failed."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract({"traceparent": request.traceparent})
        attributes = {"model": request.model, "request.id": request.id}
        return self._tracer.start_as_current_span(
            "ModelInfer", parent, kind=SpanKind.SERVER, attributes=attributes
        )

    def close(self) -> None:
        """Send what waits, then stop."""
        self._provider.shutdown()
