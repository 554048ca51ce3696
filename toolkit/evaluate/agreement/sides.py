"""The two sides of a comparison: an ONNX model, an engine, or saved outputs."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from device.runtime.executors.emulated import EmulatedExecutor
from device.runtime.session import Dla
from toolkit.errors import BuildError, CompareError
from toolkit.evaluate.infer.engine_runner import EngineRunner
from toolkit.evaluate.infer.onnx_runner import OnnxRunner
from toolkit.evaluate.infer.runner import Array, Arrays, Input, Kind, kind_of
from toolkit.evaluate.infer.saved import load_samples
from toolkit.evaluate.infer.traces import SegmentTrace, tensor_of
from toolkit.importers.onnx import read_model_file
from toolkit.plugins import Plugin


class Side(Protocol):
    """One side. Samples are numbered from 0; saved outputs ignore the feeds."""

    kind: Kind
    title: str
    precision: str
    inputs: tuple[Input, ...]

    def outputs(self, number: int, feeds: Mapping[str, Array]) -> Arrays:
        """Return the outputs of a sample. Raises TandemError."""

    def tensors(self, number: int, feeds: Mapping[str, Array]) -> Arrays:
        """Return all tensors that this side shows, in running order. Raises TandemError."""

    def values(self, number: int, feeds: Mapping[str, Array], names: Sequence[str]) -> Arrays:
        """Return those of `names` that this side shows, computed for them alone where it can."""

    def close(self) -> None:
        """Release what it holds."""


class ModelSide:
    """An ONNX model in onnxruntime."""

    kind: Kind = "model"

    def __init__(self, path: Path, plugins: Sequence[Plugin]) -> None:
        """Read the model; raises TandemError."""
        self.file = read_model_file(path, plugins)
        self.runner = OnnxRunner(self.file.model, str(path))
        self.title, self.precision = str(path), self.runner.precision
        self.inputs = self.runner.inputs
        self._computed = frozenset(str(v.name) for n in self.file.model.graph for v in n.outputs)

    def outputs(self, number: int, feeds: Mapping[str, Array]) -> Arrays:
        """Run the model."""
        return self.runner.run(feeds)

    def tensors(self, number: int, feeds: Mapping[str, Array]) -> Arrays:
        """Run the model with every tensor as an output."""
        return self.runner.tensors(feeds)

    def values(self, number: int, feeds: Mapping[str, Array], names: Sequence[str]) -> Arrays:
        """Run the part of the model that computes `names`."""
        known = [name for name in names if name in self._computed]
        return self.runner.values(feeds, known) if known else {}

    def close(self) -> None:
        """Release the session."""
        self.runner.close()


class EngineSide:
    """An engine on this machine; segments in onnxruntime or the emulation show what is inside."""

    kind: Kind = "engine"

    def __init__(self, path: Path, dla: Dla) -> None:
        """Open and load it; raises TandemError."""
        self.runner = EngineRunner(path, dla)
        self.title, self.precision = str(path), self.runner.precision
        self.inputs = self.runner.inputs
        self.hidden: tuple[str, ...] = ()
        self._traces: list[SegmentTrace] = []
        self._emulated: dict[str, EmulatedExecutor] = {}
        self._inputs_of = {s.name: tuple(s.inputs) for s in self.runner.manifest.segments}
        running = {r.segment: r.implementation for r in self.runner.session.reports}
        executors = self.runner.session.executors
        for segment, executor in zip(self.runner.manifest.segments, executors, strict=True):
            if isinstance(executor, EmulatedExecutor):
                self._emulated[segment.name] = executor
                continue
            with suppress(BuildError):  # a type that onnxruntime hands out to nobody
                if running[segment.name] == "portable":
                    self._traces.append(SegmentTrace(self.runner.engine, segment))
                    continue
            self.hidden += (segment.name,)
        self._shown: tuple[int, Arrays] | None = None

    def outputs(self, number: int, feeds: Mapping[str, Array]) -> Arrays:
        """Run the engine."""
        return self.runner.run(feeds)

    def tensors(self, number: int, feeds: Mapping[str, Array]) -> Arrays:
        """Return what segments pass on, and what portable ones compute inside."""
        if self._shown is not None and self._shown[0] == number:
            return self._shown[1]
        borders, stored = self.runner.passed(feeds)
        shown: Arrays = {}
        for trace in self._traces:
            shown.update(trace.run({n: stored[n] for n in trace.segment.inputs}))
        for segment, executor in self._emulated.items():
            inputs = {n: stored[n] for n in self._inputs_of[segment]}
            shown.update({tensor_of(step): step.real() for step in executor.trace(inputs)})
        shown.update(borders)
        self._shown = (number, shown)
        return shown

    def values(self, number: int, feeds: Mapping[str, Array], names: Sequence[str]) -> Arrays:
        """Return those of `names` that one run of the whole engine shows."""
        shown = self.tensors(number, feeds)
        return {name: shown[name] for name in names if name in shown}

    def close(self) -> None:
        """Close session and file."""
        self.runner.close()


class SavedSide:
    """Arrays that were saved: by `tandem infer`, numpy.savez, or another tool."""

    kind: Kind = "arrays"
    precision: str = "fp32"
    inputs: tuple[Input, ...] = ()

    def __init__(self, path: Path) -> None:
        """Read the file; raises InferError."""
        self.title = str(path)
        self.samples = load_samples(path)

    def outputs(self, number: int, feeds: Mapping[str, Array]) -> Arrays:
        """Return a sample. Raises CompareError: the file has fewer."""
        if number >= len(self.samples):
            raise CompareError(
                f"{self.title} holds {len(self.samples)} samples, the inputs more; give the inputs "
                "that it was computed on, or --samples"
            )
        return self.samples[number]

    def tensors(self, number: int, feeds: Mapping[str, Array]) -> Arrays:
        """Return all that is in the file."""
        return self.outputs(number, feeds)

    def values(self, number: int, feeds: Mapping[str, Array], names: Sequence[str]) -> Arrays:
        """Return those of `names` that are in the file."""
        sample = self.outputs(number, feeds)
        return {name: sample[name] for name in names if name in sample}

    def close(self) -> None:
        """Nothing is held."""


def open_side(path: Path, *, dla: Dla = "portable", plugins: Sequence[Plugin] = ()) -> Side:
    """Open a file as a side. Raises TandemError: it is none, or cannot be loaded."""
    kind = kind_of(path)
    if kind == "engine":
        return EngineSide(path, dla)
    return ModelSide(path, plugins) if kind == "model" else SavedSide(path)


def built_from(sides: Iterable[Side]) -> bool:
    """Whether one side is an engine that was built from the other, a model."""
    models = {side.file.sha256 for side in sides if isinstance(side, ModelSide)}
    engines = (side.runner.manifest for side in sides if isinstance(side, EngineSide))
    return any(manifest.provenance.model_sha256 in models for manifest in engines)
