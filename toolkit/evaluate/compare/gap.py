"""What a DLA loses against a GPU with the same ranges, step by step, and what takes it.

Each step is a run of its own: the GPU with its own ranges, with those that the DLA's rules make of
them, with what the DLA clips, the engine's Q/DQ graph, and the DLA. The losses of all steps add up
to the whole.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from calibration.table import QMAX
from device.error_figures import sqnr_db
from toolkit.evaluate.compare.causes import clipping_cost_db
from toolkit.evaluate.compare.gpu import GpuNetwork
from toolkit.quantize.loss.parts import OutputPart, split_outputs

Array = NDArray[Any]
Arrays = dict[str, Array]
GpuStage = Literal["gpu", "shared", "clipped"]

SHARED = "scales that the DLA's rules share"
CLIPPING = "ranges too narrow for what the DLA writes in INT8 and a GPU hands on in floating point"
ROUNDING = "rounding that a GPU does not do"
ARITHMETIC = "the DLA's arithmetic"
LEAST_LOST = 0.1
UNHEARD_DB = 60.0
"""Noise so far below a result, a tenth of what INT8 itself makes, counts as none."""
"""dB or points: a smaller loss is none."""
LEAST_CLIPPED_DB = 1.0
"""A range that costs its tensor less by clipping is not held to account."""


@dataclass(frozen=True, slots=True)
class Stages:
    """One figure, in dB or points, of every run between the GPU and the DLA."""

    gpu: float
    shared: float
    clipped: float
    rounded: float
    dla: float

    @property
    def lost(self) -> float:
        """What the DLA loses against the GPU."""
        return self.gpu - self.dla

    @property
    def causes(self) -> tuple[tuple[str, float], ...]:
        """Cause and loss of every step, the largest first."""
        figures = (self.gpu, self.shared, self.clipped, self.rounded, self.dla)
        names = (SHARED, CLIPPING, ROUNDING, ARITHMETIC)
        steps = zip(names, figures, figures[1:], strict=False)
        return tuple(sorted(((n, a - b) for n, a, b in steps), key=lambda step: -step[1]))


@dataclass(frozen=True, slots=True)
class ClippedTensor:
    """A tensor that the DLA clips and a GPU does not.

    Its range, its largest magnitude on a GPU, and what clipping it alone takes from the output's
    SQNR, in dB.
    """

    tensor: str
    amax: float
    largest: float
    lost_db: float


@dataclass(frozen=True, slots=True)
class Gap:
    """What the DLA loses against the GPU of one measure; `clipped`: the costliest tensor first."""

    measure: str
    unit: str
    stages: Stages
    clipped: tuple[ClippedTensor, ...]


class GapTally:
    """Runs the GPU's graph on samples beside the engine's, and adds up what each step loses."""

    def __init__(
        self, gpu: GpuNetwork, with_own_ranges: GpuNetwork, parts: Sequence[OutputPart]
    ) -> None:
        """`gpu` has the ranges of the engine; `with_own_ranges` those that a GPU would take.

        `parts` are judged each by itself: boxes in pixels would hide what scores lose.
        """
        self._gpu, self._own, self._parts = gpu, with_own_ranges, parts
        self._outputs: dict[str, _Output] = {}  # by the names of the parts
        self._largest: dict[str, float] = {}

    @property
    def has_own_ranges(self) -> bool:
        """Whether the GPU has other ranges than the engine."""
        return self._own is not self._gpu

    def infer(self, feeds: Mapping[str, Array], stage: GpuStage) -> Arrays:
        """Return all tensors of one of the runs on the GPU."""
        if stage == "gpu":
            return self._own.run(feeds)
        return self._gpu.run(feeds, self._gpu.scales if stage == "clipped" else ())

    def add(self, feeds: Mapping[str, Array], exact: Arrays, graph: Arrays, dla: Arrays) -> Arrays:
        """Count a sample; `graph`, `dla`: the engine's outputs. Returns the tensors of the GPU."""
        gpu_outputs = self.infer(feeds, "gpu")
        shared = self.infer(feeds, "shared") if self.has_own_ranges else gpu_outputs
        clipped = self._outputs_of(feeds, self._gpu.scales)
        alone: dict[str, Arrays] = {}
        for tensor, scale in self._gpu.scales.items():
            if clipping_cost_db(shared[tensor], scale) >= LEAST_CLIPPED_DB:
                largest = float(np.max(np.abs(shared[tensor])))
                self._largest[tensor] = max(self._largest.get(tensor, 0.0), largest)
                alone[tensor] = self._outputs_of(feeds, (tensor,))
        parts = [part for part in self._parts if part.output in exact]
        expected = split_outputs(parts, exact)
        real = [split_outputs(parts, run) for run in (gpu_outputs, shared, clipped, graph, dla)]
        of_tensor = {tensor: split_outputs(parts, run) for tensor, run in alone.items()}
        for name, values in expected.items():
            if all(run[name].shape == values.shape for run in real):
                self._outputs.setdefault(name, _Output()).add(
                    values,
                    [run[name] for run in real],
                    {tensor: run[name] for tensor, run in of_tensor.items()},
                )
        return gpu_outputs

    def _outputs_of(self, feeds: Mapping[str, Array], clipped: Collection[str]) -> Arrays:
        """Return the outputs alone: all tensors of every run together may be gigabytes."""
        values = self._gpu.run(feeds, clipped)
        return {name: values[name] for name in self._gpu.outputs}

    def worst(self) -> Gap | None:
        """Return the gap of the part that loses most, in dB; None: FP32 has none of them."""
        gaps = [
            Gap(f"SQNR of {name}", "dB", output.stages(), self._clipped(output))
            for name, output in self._outputs.items()
        ]
        return max(gaps, key=lambda gap: gap.stages.lost, default=None)

    def of_metric(self, metric: str, points: Stages) -> Gap:
        """Return the gap of a task's metric; its tensors are those that cost any output most."""
        by_tensor: dict[str, ClippedTensor] = {}
        for output in self._outputs.values():
            for one in self._clipped(output):
                known = by_tensor.get(one.tensor)
                if known is None or known.lost_db < one.lost_db:
                    by_tensor[one.tensor] = one
        return Gap(metric, "points", points, _costliest(by_tensor.values()))

    def _clipped(self, output: "_Output") -> tuple[ClippedTensor, ...]:
        return _costliest(
            ClippedTensor(tensor, QMAX * self._gpu.scales[tensor], largest, output.lost_db(tensor))
            for tensor, largest in self._largest.items()
        )


class _Output:
    """Energies of one part of an output: its own, and those of the errors of each run."""

    def __init__(self) -> None:
        self._signal = 0.0
        self._noise = [0.0] * len(fields(Stages))
        self._alone: dict[str, float] = {}  # what clipping one tensor adds to that of `shared`

    def add(self, exact: Array, runs: Sequence[Array], alone: Mapping[str, Array]) -> None:
        self._signal += _energy(exact, np.zeros_like(exact))
        noise = [_energy(values, exact) for values in runs]
        self._noise = [a + b for a, b in zip(self._noise, noise, strict=True)]
        for tensor, values in alone.items():
            more = _energy(values, exact) - noise[_SHARED]
            self._alone[tensor] = self._alone.get(tensor, 0.0) + more

    def stages(self) -> Stages:
        return Stages(*(self._db(noise) for noise in self._noise))

    def lost_db(self, tensor: str) -> float:
        shared = self._noise[_SHARED]
        return self._db(shared) - self._db(max(0.0, shared + self._alone.get(tensor, 0.0)))

    def _db(self, noise: float) -> float:
        return min(UNHEARD_DB, max(-UNHEARD_DB, sqnr_db(self._signal, noise)))


_SHARED = [stage.name for stage in fields(Stages)].index("shared")


def _energy(computed: Array, exact: Array) -> float:
    error = np.asarray(computed, np.float64) - np.asarray(exact, np.float64)
    return float(np.vdot(error, error))


def _costliest(tensors: Iterable[ClippedTensor]) -> tuple[ClippedTensor, ...]:
    named = [tensor for tensor in tensors if tensor.lost_db >= LEAST_LOST]
    return tuple(sorted(named, key=lambda one: -one.lost_db))
