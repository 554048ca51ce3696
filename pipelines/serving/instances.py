"""Opens the instances of an engine or of a model.onnx."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from device.engine.file import open_engine
from device.engine.manifest import DimRange, Manifest, TensorInfo
from device.errors import SessionError
from device.runtime.executors.protocol import ExecutorName
from device.runtime.pool import turns_of
from device.runtime.session import Session
from pipelines.serving.model_config import (
    Dim,
    Port,
)
from pipelines.serving.onnx_file import OnnxFile
from pipelines.serving.protocol import (
    BY_NUMPY,
    DATATYPES,
    Array,
)

MAX_INSTANCES = 16


class Runner(Protocol):
    """One instance of a model."""

    def infer(self, feeds: Mapping[str, Array], /) -> dict[str, Array]:
        """Run it once."""

    def close(self) -> None:
        """Give back what it holds."""


@dataclass(frozen=True, slots=True)
class ModelInstances:
    """Instances of a file, and what they take and give."""

    runners: Sequence[Runner]
    inputs: Sequence[Port]
    outputs: Sequence[Port]


def open_file(
    path: Path,
    count: int,
    dla_core: int | None,
    profile: str | None,
    executor: ExecutorName = "auto",
) -> ModelInstances:
    """Open the instances of an engine, or of a model.onnx; all share its weights.

    `count` 0: one, or one for each DLA core where frames take turns on them. They have run once
    when this returns. Raises TandemError.
    """
    if count > MAX_INSTANCES:
        raise SessionError(f"{path}: {count} instances were asked for; at most {MAX_INSTANCES} run")
    with ExitStack() as stack:
        runners: list[Runner] = []
        if path.suffix == ".onnx":
            if executor != "auto":
                raise SessionError(f"{path} runs in onnxruntime alone; build an engine of it")
            first = OnnxFile(path)
            runners = [first, *(OnnxFile(path, first) for _ in range(1, count))]
            inputs, outputs = first.inputs, first.outputs
        else:
            engine = stack.enter_context(open_engine(path))
            turn = 0 if dla_core is None else None
            session = Session(
                engine, profile=profile, dla_core=dla_core, turn=turn, executor=executor
            )
            closing = stack.enter_context(ExitStack())
            closing.callback(session.close)
            runners.append(session)
            for number in range(1, count or turns_of(engine, session)):
                turn = number if dla_core is None else None
                session = Session(
                    engine, profile=profile, dla_core=dla_core, turn=turn, executor=executor
                )
                closing.callback(session.close)
                runners.append(session)
            inputs, outputs = ports_of_engine(engine.manifest)
            for runner in runners:
                warm_up(runner, inputs)
            closing.pop_all()
        return ModelInstances(runners, inputs, outputs)


def warm_up(runner: Runner, inputs: Sequence[Port]) -> None:
    """Run an instance once, on zeros of the sizes that it was built for. Raises SessionError."""
    runner.infer({
        port.name: np.zeros(
            [usual_size(dim) for dim in port.dims], DATATYPES[port.datatype].numpy
        )
        for port in inputs
    })  # fmt: skip


def usual_size(dim: Dim) -> int:
    """Return the size that a dimension was built for."""
    return dim.opt if isinstance(dim, DimRange) else dim if isinstance(dim, int) else 1


def ports_of_engine(manifest: Manifest) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    """Return the inputs and outputs of an engine."""
    dims = {dim.name: dim for dim in manifest.dims}
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    inputs, outputs = (
        tuple(_port(tensors[name], dims) for name in names)
        for names in (manifest.inputs, manifest.outputs)
    )
    return inputs, outputs


def _port(tensor: TensorInfo, dims: Mapping[str, DimRange]) -> Port:
    sizes = tuple(dims[dim] if isinstance(dim, str) else dim for dim in tensor.shape)
    return Port(tensor.name, BY_NUMPY[tensor.dtype], sizes)
