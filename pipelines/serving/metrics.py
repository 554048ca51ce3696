"""Figures for Prometheus: Triton's names, and our own."""

from pipelines.metrics import Family, Figures, Rows, render
from pipelines.serving.figures import STAGES
from pipelines.serving.model import Model
from pipelines.serving.service import Service

REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


def metrics_text(service: Service, connections: int) -> str:
    """Return all figures as they are now."""
    by_model = [
        ({"model": model.name, "version": str(model.version)}, model)
        for model in list(service.repository.models)
    ]

    def rows(value: str) -> Rows:
        return [(labels, getattr(model.figures, value)) for labels, model in by_model]

    failures: Rows = [
        ({**labels, "reason": reason}, model.figures.failures[reason])
        for labels, model in by_model
        for reason in REASONS
    ]
    request_us: Rows = [(labels, _request_us(model)) for labels, model in by_model]
    pending: Rows = [(labels, model.pending) for labels, model in by_model]
    families: list[Family] = [
        ("nv_inference_request_success", "counter", "Successful requests.", rows("success")),
        ("nv_inference_request_failure", "counter", "Failed requests by reason.", failures),
        ("nv_inference_count", "counter", "Inferences: rows of batches.", rows("inferences")),
        ("nv_inference_exec_count", "counter", "Executions: batches.", rows("executions")),
        ("nv_inference_request_duration_us", "counter", "Time of requests.", request_us),
        ("nv_inference_pending_request_count", "gauge", "Requests not answered yet.", pending),
    ]
    for place, stage in enumerate(STAGES):
        spent: Rows = [(one, model.figures.spent_ns[place] // 1000) for one, model in by_model]
        name = f"nv_inference_{stage}_duration_us"
        families.append((name, "counter", f"Time of the stage {stage}.", spent))
    in_flight = service.in_flight_bytes
    process_families: list[Family] = [
        ("serve_http_connections", "gauge", "Open connections of HTTP.", [({}, connections)]),
        ("serve_models_ready", "gauge", "Versions that are ready.", [({}, len(by_model))]),
        ("serve_request_bytes", "gauge", "Bytes of requests being answered.", [({}, in_flight)]),
    ]
    return render(Figures(families), prefix="") + render(Figures(process_families))


def _request_us(model: Model) -> int:
    return (model.figures.success_ns + model.figures.fail_ns) // 1000
