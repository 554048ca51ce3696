"""Runs an engine on this machine, and shows the tensors that its segments pass on."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from device.engine.arithmetic import arithmetic_of
from device.engine.file import Engine, open_engine
from device.engine.manifest import Manifest, TensorInfo
from device.runtime.executors.protocol import ExecutorName
from device.runtime.feeds import check_feeds
from device.runtime.session import Dla, Session
from toolkit.evaluate.infer.runner import Array, Arrays, Input, fitted


class EngineRunner:
    """An engine in a session."""

    def __init__(self, path: Path, dla: Dla = "portable", executor: ExecutorName = "auto") -> None:
        """Open and load it; raises TandemError."""
        self.engine: Engine = open_engine(path)
        try:
            self.session = Session(self.engine, dla=dla, executor=executor)
        except BaseException:
            self.engine.close()
            raise
        self.title = str(path)
        usual = {dim.name: dim.opt for dim in self.session.dims}
        self.inputs: tuple[Input, ...] = tuple(
            Input(t.name, t.dtype, tuple(d if d is not None else "" for d in t.shape), usual)
            for t in self.session.inputs
        )
        self.outputs: tuple[str, ...] = tuple(t.name for t in self.session.outputs)

    @property
    def manifest(self) -> Manifest:
        """What the engine says of itself."""
        return self.engine.manifest

    @property
    def precision(self) -> str:
        """What it computes in."""
        return arithmetic_of(self.manifest)

    @property
    def remarks(self) -> tuple[str, ...]:
        """How each segment runs here."""
        return tuple(f"{r.segment}: {r.implementation}" for r in self.session.reports)

    def run(self, feeds: Mapping[str, Array]) -> Arrays:
        """Return the outputs; raises TandemError."""
        return self.session.infer(fitted(feeds, self.inputs, self.title))

    def tensors(self, feeds: Mapping[str, Array]) -> Arrays:
        """Return what the segments pass on and give, INT8 in real numbers; raises TandemError."""
        return self.passed(feeds)[0]

    def passed(self, feeds: Mapping[str, Array]) -> tuple[Arrays, Arrays]:
        """Return what the segments pass on and give, in real numbers and as it is stored.

        The second holds the inputs too. Raises TandemError.
        """
        stored = fitted(feeds, self.inputs, self.title)
        ranges = {dim.name: dim for dim in self.session.dims}
        sizes = check_feeds(stored, self.session.inputs, ranges)
        infos = {tensor.name: tensor for tensor in self.manifest.tensors}
        real: Arrays = {}
        for segment, executor in zip(self.manifest.segments, self.session.executors, strict=True):
            results = executor.run(
                {name: stored[name] for name in segment.inputs},
                dict.fromkeys(segment.outputs),
                sizes,
            )
            # An executor may hand out memory of its own, which the next run overwrites.
            stored.update({name: np.array(array) for name, array in results.items()})
            real.update({name: _real(stored[name], infos[name]) for name in segment.outputs})
        return real, stored

    def close(self) -> None:
        """Close session and file."""
        self.session.close()
        self.engine.close()


def _real(array: Array, info: TensorInfo) -> Array:
    """Return the real numbers of a tensor: real = scale * stored."""
    return array if info.scale is None else array.astype(np.float32) * np.float32(info.scale)
