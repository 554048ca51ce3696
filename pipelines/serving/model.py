"""A model that is served: its names, what it takes and gives, and its figures."""

import asyncio
import time
from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from device.closing import Closing
from device.engine.manifest import DimRange
from device.runtime.cuda.device_array import DeviceArray
from pipelines.serving.figures import Figures
from pipelines.serving.model_config import (
    Config,
    ModelPort,
    Port,
    in_range,
    ports_of,
)
from pipelines.serving.protocol import (
    BYTES,
    Array,
    InferRequest,
    Refusal,
    RequestedOutput,
    Status,
    Tensor,
    refuse,
    to_bf16,
    whole,
)

MAX_CHECKED = 64  # signatures of a model that are known to fit
_NO_DATA: Array = np.empty(0, np.uint8)  # of an output on the GPU


class Model(Closing):
    """What all models have: names, a configuration, inputs and outputs, figures."""

    def __init__(
        self, version: int, config: Config, inputs: Sequence[Port], outputs: Sequence[Port],
        folder: Path,
    ) -> None:  # fmt: skip
        """Raises ConfigError: the configuration does not fit the ports."""
        self.name: str = config.name
        self.version = version
        self.config = config
        self.inputs = ports_of(config, inputs, "input", folder)
        self.outputs = ports_of(config, outputs, "output", folder)
        self.max_batch: int = config.max_batch_size
        self.figures = Figures()
        self.pending = 0
        self._all_outputs = tuple(map(RequestedOutput, self.outputs))
        self._checked: set[Hashable] = set()  # what `_check` found to fit

    @abstractmethod
    async def run(self, request: InferRequest) -> Mapping[str, Array | DeviceArray]:
        """Return the outputs for a request that was checked; those that were written to its
        `targets` on the GPU. Raises Refusal."""

    def metadata(self, versions: Sequence[int]) -> dict[str, Any]:
        """Return the metadata, with the versions that are ready."""
        batch = [-1] if self.max_batch else []
        return {
            "name": self.name,
            "versions": [str(version) for version in versions],
            "platform": self.config.platform or self.config.backend,
            **{
                key: [
                    {"name": p.name, "datatype": p.datatype, "shape": batch + p.shape()}
                    for p in ports.values()
                ]
                for key, ports in (("inputs", self.inputs), ("outputs", self.outputs))
            },
        }

    async def infer(self, request: InferRequest) -> list[Tensor]:
        """Check a request, run it and return what it wants. Raises Refusal."""
        started_ns = time.perf_counter_ns()
        self.pending += 1
        failure = "OTHER"
        try:
            self._check(request)
            outputs = await self.run(request)
            requested = request.outputs or self._all_outputs
            tensors = [self._output(one, outputs[one.name]) for one in requested]
            failure = ""
            return tensors
        except asyncio.CancelledError:
            failure = "CANCELED"
            raise
        except Refusal as refusal:
            failure = _REASONS.get(refusal.status, "OTHER")
            raise
        finally:
            self.pending -= 1
            self.figures.record_request(time.perf_counter_ns() - started_ns, failure)

    def rows(self, request: InferRequest) -> int:
        """Return the size of a request's batch."""
        return request.inputs[0].shape[0] if self.max_batch and request.inputs else 1

    def _check(self, request: InferRequest) -> None:
        """Raise Refusal: names, datatypes or shapes do not fit. Clients ask with the same ones
        again and again: those that fitted are known."""
        signature = (
            tuple([(one.name, one.datatype, one.shape) for one in request.inputs]),
            tuple([output.name for output in request.outputs]),
        )
        if signature in self._checked:
            return
        self._check_outputs(signature[1])
        self._check_inputs(request)
        if len(self._checked) >= MAX_CHECKED:
            self._checked.clear()
        self._checked.add(signature)

    def _check_outputs(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.outputs:
                refuse(
                    f"unexpected inference output {name!r} for model {self.name!r}; it has"
                    f" {', '.join(self.outputs)}"
                )
        if len(set(names)) < len(names):
            double = next(name for name in names if names.count(name) > 1)
            refuse(
                f"output {double!r} already exists in request: it is requested of model"
                f" {self.name!r} more than once"
            )

    def _check_inputs(self, request: InferRequest) -> None:
        names = [tensor.name for tensor in request.inputs]
        needed = [port.name for port in self.inputs.values() if not port.optional]
        if len(set(names)) < len(names):
            double = next(name for name in names if names.count(name) > 1)
            refuse(f"input {double!r} of model {self.name!r} is given more than once")
        for name in names:
            if name not in self.inputs:
                refuse(
                    f"unexpected inference input {name!r} for model {self.name!r}; it has"
                    f" {', '.join(self.inputs)}"
                )
        if missing := [name for name in needed if name not in names]:
            count, most = len(needed), len(self.inputs)
            between = f"number of inputs between {count} and {most}"
            refuse(
                f"expected {f'{count} inputs' if count == most else between} but got {len(names)}"
                " inputs for model"
                f" {self.name!r}. Got input(s) {_listed(names)}, but missing required input(s)"
                f" {_listed(missing)}. Please provide all required input(s)."
            )
        sizes: dict[str, int] = {}
        for tensor in request.inputs:
            self._check_tensor(tensor, self.inputs[tensor.name], sizes)

    def _check_tensor(self, tensor: Tensor, port: ModelPort, sizes: dict[str, int]) -> None:
        where = f"inference input {tensor.name!r} of model {self.name!r}"
        if tensor.datatype != port.datatype:
            refuse(f"{where} has the data-type {tensor.datatype}; the model takes {port.datatype}")
        shape = tensor.shape
        expected = ([-1] if self.max_batch else []) + port.shape()
        if len(shape) != len(expected):
            refuse(
                f"unexpected shape of {where}: expected {expected}, got {list(shape)}, which has"
                f" {len(shape)} dimensions and not {len(expected)}"
            )
        if self.max_batch:
            self._check_rows(where, shape[0], sizes)
            shape = shape[1:]
        for size, dim in zip(shape, port.dims, strict=True):
            if isinstance(dim, int) and size != dim:
                refuse(
                    f"unexpected shape of {where}: expected {expected}, got {list(tensor.shape)}"
                )
            if isinstance(dim, DimRange):
                _check_range(where, size, dim, sizes)

    def _check_rows(self, where: str, rows: int, sizes: dict[str, int]) -> None:
        if not 1 <= rows <= self.max_batch:
            refuse(
                f"unexpected shape of {where}: the batch-size must be 1 to {self.max_batch}"
                f" (max_batch_size), got {rows}"
            )
        if rows != sizes.setdefault("", rows):
            refuse(f"{where} has the batch-size {rows}; an input before it has {sizes['']}")

    def _output(self, requested: RequestedOutput, array: Array | DeviceArray) -> Tensor:
        port = self.outputs[requested.name]
        if isinstance(array, DeviceArray):
            return Tensor(requested.name, port.datatype, array.shape, _NO_DATA, device=array)
        if port.converted:
            array = to_bf16(array)
        if classes := _classes(requested):
            array = classify(array, classes, port.labels, batched=self.max_batch > 0)
            return Tensor(requested.name, BYTES, array.shape, array)
        if port.inner is not None:
            batch = array.shape[:1] if self.max_batch else ()
            array = array.reshape(*batch, *port.shape())
        return Tensor(requested.name, port.datatype, array.shape, array)


def _classes(requested: RequestedOutput) -> int:
    """Return how many classes of an output are asked for; 0: its values. Raises Refusal."""
    if not requested.parameters:
        return 0
    return whole(requested.parameters, "classification", f"output {requested.name!r}")


def _listed(names: Sequence[str]) -> str:
    return f"[{','.join(map(repr, names))}]"


def _check_range(where: str, size: int, dim: DimRange, sizes: dict[str, int]) -> None:
    if not in_range(size, dim):
        step = f" in steps of {dim.step}" if dim.step > 1 else ""
        refuse(
            f"unexpected shape of {where}: dimension {dim.name!r} is {size}; the engine takes"
            f" {dim.min} to {dim.max}{step}"
        )
    if sizes.setdefault(dim.name, size) != size:
        refuse(
            f"unexpected shape of {where}: dimension {dim.name!r} is {size}, and"
            f" {sizes[dim.name]} before"
        )


_REASONS = {
    Status.UNAVAILABLE: "REJECTED",
    Status.BUSY: "REJECTED",
    Status.INTERNAL: "BACKEND",
}


def classify(scores: Array, count: int, labels: Sequence[str], *, batched: bool) -> Array:
    """Return the best `count` classes of each batch entry as VALUE:INDEX[:LABEL]."""
    if scores.dtype.kind in "Ob":
        refuse(f"classification was asked for of {scores.dtype}; it takes numbers")
    rows = scores.reshape(len(scores) if batched else 1, -1)
    count = min(count, rows.shape[1])
    order = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")[:, :count]
    texts = np.empty(order.shape, object)
    for (row, place), index in np.ndenumerate(order):
        value = rows[row, index]
        text = f"{value:f}" if rows.dtype.kind == "f" else str(value)
        label = f":{labels[index]}" if index < len(labels) else ""
        texts[row, place] = f"{text}:{index}{label}".encode()
    return texts if batched else texts[0]
