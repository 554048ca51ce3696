"""What both ports answer: plain values in, plain values out, refusals raised."""

import hmac
import logging
from collections.abc import Mapping
from importlib.metadata import version as installed
from typing import Any

import numpy as np
from msgspec.structs import replace

from device.runtime.cuda.device_array import DeviceArray
from pipelines.serving.codec import to_bytes
from pipelines.serving.cuda_memory import CudaRegion
from pipelines.serving.model import Model
from pipelines.serving.model_config import as_json
from pipelines.serving.protocol import (
    InferRequest,
    InferResponse,
    Parameter,
    Parameters,
    Refusal,
    RequestedOutput,
    Status,
    Tensor,
    refuse,
)
from pipelines.serving.repository import Repository
from pipelines.serving.shared_memory import AnyRegion, Regions
from pipelines.serving.spans import Spans

EXTENSIONS = (
    "binary_tensor_data", "classification", "cuda_shared_memory", "logging", "model_configuration",
    "model_repository", "model_repository(unload_dependents)", "parameters", "schedule_policy",
    "sequence", "statistics", "system_shared_memory", "trace",
)  # fmt: skip

# Settings that clients may read and change, with their values at the start.
LOG_SETTINGS: Parameters = {
    "log_file": "", "log_info": True, "log_warning": True, "log_error": True,
    "log_verbose_level": 0, "log_format": "default",
}  # fmt: skip
TRACE_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "trace_file": ("",), "trace_level": ("OFF",), "trace_rate": ("1000",), "trace_count": ("-1",),
    "log_frequency": ("0",), "trace_mode": ("opentelemetry",),
}  # fmt: skip
LEVELS = (
    ("log_info", logging.INFO),
    ("log_warning", logging.WARNING),
    ("log_error", logging.ERROR),
)

_log = logging.getLogger(__name__)
_trace_log = logging.getLogger("tandem.trace")


class Service:
    """The server's answers; all methods are for the thread of the event loop."""

    def __init__(
        self, repository: Repository, regions: Regions, *, token: str = "",
        max_request_bytes: int, max_in_flight_bytes: int, spans: Spans | None = None,
        name: str = "tandem",
    ) -> None:  # fmt: skip
        self.repository = repository
        self.regions = regions
        self.ready = False
        self.max_request_bytes = max_request_bytes
        self._spans = spans
        self._name = name
        self._token = token
        self._max_in_flight_bytes = max_in_flight_bytes
        self._in_flight_bytes = 0
        self._log = dict(LOG_SETTINGS)
        self._trace: dict[str, dict[str, tuple[str, ...]]] = {"": dict(TRACE_SETTINGS)}

    @property
    def has_spans(self) -> bool:
        """Whether inferences are traced for a collector."""
        return self._spans is not None

    @property
    def in_flight_bytes(self) -> int:
        """The bytes of requests that are being answered."""
        return self._in_flight_bytes

    def authorize(self, header: str) -> None:
        """Check the value of `authorization`. Raises Refusal."""
        kind, _, token = header.partition(" ")
        if self._token and not (
            kind.lower() == "bearer"
            and hmac.compare_digest(token.strip().encode(), self._token.encode())
        ):
            refuse(
                "this server asks for a token: send `authorization: Bearer TOKEN`",
                Status.UNAUTHENTICATED,
            )

    def hold(self, size: int, total: int = 0, what: str = "request size") -> None:
        """Count bytes until `release`, of a request of `total`. Raises Refusal: the request is too
        large, or too many are held."""
        total = max(size, total)
        if total > self.max_request_bytes:
            refuse(
                f"{what} of {total} bytes exceeds the maximum allowed input size of"
                f" {self.max_request_bytes} bytes (`tandem serve --request-mb`)",
                Status.TOO_LARGE,
            )
        self._count(size, total)

    def _count(self, size: int, total: int) -> None:
        if self._in_flight_bytes + size > self._max_in_flight_bytes:
            refuse(
                f"requests of {self._in_flight_bytes} bytes are being answered, and this one has"
                f" {total}; this server holds {self._max_in_flight_bytes}: try again later",
                Status.BUSY,
            )
        self._in_flight_bytes += size

    def release(self, size: int) -> None:
        """Forget the bytes of a request."""
        self._in_flight_bytes -= size

    def server_metadata(self) -> dict[str, Any]:
        """Name, version and extensions."""
        return {
            "name": self._name, "version": installed("tandem-edge"), "extensions": list(EXTENSIONS),
        }  # fmt: skip

    def model_metadata(self, name: str, version: str = "") -> dict[str, Any]:
        """Inputs and outputs of a model. Raises Refusal."""
        model = self.repository.find(name, version)
        return model.metadata(self.repository.versions(name))

    def model_config(self, name: str, version: str = "") -> dict[str, Any]:
        """The configuration of a model. Raises Refusal."""
        return as_json(self.repository.find(name, version).config)

    def statistics(self, name: str = "", version: str = "") -> dict[str, Any]:
        """The figures of a model, or of all. Raises Refusal."""
        if not name:
            models = self.repository.models
        elif version:
            models = [self.repository.find(name, version)]
        else:
            self.repository.find(name)
            numbers = self.repository.versions(name)
            models = [self.repository.find(name, str(number)) for number in numbers]
        return {
            "model_stats": [
                {"name": model.name, "version": str(model.version), **model.figures.as_json()}
                for model in models
            ]
        }

    def trace_settings(
        self, model: str, changes: Mapping[str, tuple[str, ...] | None]
    ) -> dict[str, tuple[str, ...]]:
        """Change the trace settings, of a model if one is named; None: as the server's. Return
        them. Raises Refusal."""
        if model:
            self.repository.find(model)
        settings = self._trace.get(model, {})
        for name, values in changes.items():
            if name not in TRACE_SETTINGS:
                refuse(f"the trace setting {name!r} is none of {', '.join(TRACE_SETTINGS)}")
            if values is None:
                settings.pop(name, None)
                if not model:
                    settings[name] = TRACE_SETTINGS[name]
            else:
                settings[name] = values
        if changes:
            self._trace[model] = settings
        return {**self._trace[""], **settings}

    def log_settings(self, changes: Parameters) -> dict[str, Parameter]:
        """Change the log settings and return them. Raises Refusal."""
        for name, value in changes.items():
            if name not in self._log:
                refuse(f"the log setting {name!r} is none of {', '.join(self._log)}")
            if type(value) is not type(LOG_SETTINGS[name]):
                kind = type(LOG_SETTINGS[name]).__name__
                refuse(f"the log setting {name!r} is {value!r}; it takes a {kind}")
            if name == "log_file" and value:
                refuse("the log setting 'log_file' is not taken from clients: set it at the start")
        self._log |= changes
        enabled = [level for name, level in LEVELS if self._log[name]]
        level = min(enabled, default=logging.CRITICAL)
        logging.getLogger("pipelines.serving").setLevel(
            logging.DEBUG if self._log["log_verbose_level"] else level
        )
        return dict(self._log)

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run a model. Raises Refusal."""
        if self._spans is None:
            return await self._infer(request)
        with self._spans.span(request):
            return await self._infer(request)

    async def _infer(self, request: InferRequest) -> InferResponse:
        model = self.repository.find(request.model, request.version)
        places = {
            output.name: self.regions.place(f"output {output.name!r}", output.parameters)
            for output in request.outputs
            if "shared_memory_region" in output.parameters
        }
        shared = sum([one.place[2] for one in request.inputs if one.place is not None])
        if shared or places:
            tensors = await self._infer_shared(model, request, places, shared)
        else:
            tensors = await model.infer(request)
        if request.traceparent and _trace_log.isEnabledFor(logging.INFO):
            _trace_log.info("traceparent=%s model=%s", request.traceparent, model.name)
        return InferResponse(model.name, str(model.version), tensors, request.id)

    async def _infer_shared(
        self, model: Model, request: InferRequest,
        places: Mapping[str, tuple[AnyRegion, int, int]], shared: int,
    ) -> list[Tensor]:  # fmt: skip
        """Run a model on `shared` bytes of shared memory, and write outputs to `places`."""
        self._count(shared, shared)
        try:
            inputs = [
                one if one.place is None else await self.regions.read(one) for one in request.inputs
            ]
            # What `replace` returns, in a third of the time.
            read = InferRequest(
                request.model, request.version, inputs, request.outputs, request.id,
                request.parameters, request.traceparent, _targets(places),
            )  # fmt: skip
            tensors = await model.infer(read)
        finally:
            self.release(shared)
        return [await self._placed(tensor, places.get(tensor.name)) for tensor in tensors]

    async def _placed(self, tensor: Tensor, place: tuple[AnyRegion, int, int] | None) -> Tensor:
        if place is None:
            return tensor
        if tensor.device is not None:  # it was written there
            return replace(tensor, place=(place[0].name, place[1], tensor.device.nbytes))
        data = to_bytes(tensor)
        await self.regions.write(tensor.name, place, data)
        written = (place[0].name, place[1], data.nbytes)
        return Tensor(tensor.name, tensor.datatype, tensor.shape, tensor.data, written)


def _targets(places: Mapping[str, tuple[AnyRegion, int, int]]) -> dict[str, DeviceArray]:
    """Return the places on the GPU as arrays of bytes."""
    return {
        name: region.array(offset, (size,), np.dtype(np.uint8))
        for name, (region, offset, size) in places.items()
        if isinstance(region, CudaRegion)
    }


def refusal_of(error: Exception, what: str) -> Refusal:
    """Return what a client hears of an exception; one of ours is logged."""
    if isinstance(error, Refusal):
        return error
    _log.error("%s failed", what, exc_info=error)
    return Refusal(Status.INTERNAL, f"the server failed: {error!r}"[:1000])


def wants_binary(requested: RequestedOutput | None, parameters: Parameters) -> bool:
    """Whether HTTP is to send an output as bytes."""
    default = bool(parameters.get("binary_data_output", False))
    return bool(requested.parameters.get("binary_data", default)) if requested else default
