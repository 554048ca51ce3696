"""Metrics of INT8 accuracy for trials, by name.

A metric gives one number for ranges and nodes in floating point; larger is better. Output metrics
compare with the float model and need no labels. An output o is a part of one where it holds several
(`toolkit.quantize.loss.parts`), so that boxes do not hide scores:

    signal_o = sum |y_o|^2,  noise_o = sum |y_o' - y_o|^2   over all validation samples
    sqnr     = min over o of  10 log10(signal_o / noise_o)  dB
    cosine   = min over o of  sum y_o y_o' / sqrt(sum |y_o|^2 sum |y_o'|^2)

`margin` is what the losses leave of their limits (`toolkit.quantize.loss`): 1 without any loss,
0 at a limit; `target` the same of their targets. `map50` is the mAP50 of a detector on labelled
images, 0 to 100.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from calibration.errors import CalibrationError
from calibration.trials import ALL, Assignment, SampleSelection
from device.error_figures import sqnr_db
from pipelines.config import ModelConfig
from toolkit.graph.node_view import view
from toolkit.quantize.loss.detections import comparable
from toolkit.quantize.loss.judge import Judgement, error_of, judge
from toolkit.quantize.loss.metrics import powers
from toolkit.quantize.loss.parts import split_outputs
from toolkit.quantize.quantize import int8_nodes
from toolkit.quantize.trials.trial import TrialModel

if TYPE_CHECKING:
    from toolkit.quantize.trials.score import HeldOut

Sample = Mapping[str, NDArray[Any]]
Measure = Callable[[Assignment, frozenset[str]], float]
"""Ranges and the nodes kept in floating point -> figure of merit."""
AsJudged = Callable[[Assignment, int], Assignment]
"""(Requested ranges, sample index) -> the ranges that the sample is judged with."""
Outputs = Mapping[str, NDArray[Any]]
NO_NODES: frozenset[str] = frozenset()
_Trial = tuple[frozenset[tuple[str, float | None]], int, frozenset[str]]
_Latest = tuple[frozenset[tuple[str, float | None]], frozenset[str], dict[int, Outputs]]


class OutputNoise:
    """INT8 error at the parts of the outputs, on fixed samples.

    Holds the float outputs of all samples as `exact`; a trial runs each sample once. `as_judged`
    may replace the ranges of a sample by those of the same methods without it. Nodes of
    `always_float` compute in floating point in every trial.
    """

    def __init__(
        self,
        trial: TrialModel,
        samples: Sequence[Sample],
        exact: Sequence[Outputs] | None = None,
        as_judged: AsJudged | None = None,
        always_float: frozenset[str] = NO_NODES,
    ) -> None:
        """`exact` None: the float outputs of the trial's own model.

        Raises CalibrationError: no samples.
        """
        if not samples:
            raise CalibrationError(
                "there are no validation samples, but at least one is needed to measure INT8: give "
                "more data"
            )
        self.trial = trial
        self.always_float = always_float
        self._known: dict[_Trial, Mapping[str, float]] = {}
        self._latest: _Latest = (frozenset(), NO_NODES, {})
        self._as_judged = as_judged or _as_requested
        self._samples = tuple(samples)
        if exact is None:
            all_nodes = frozenset(trial.nodes)
            exact = [self._parts(trial({}, sample, all_nodes)) for sample in self._samples]
        self.exact = tuple(exact)
        signal = {
            name: sum(_power(outputs[name]) for outputs in self.exact) for name in self.exact[0]
        }
        # Outputs that are zero, or that overflow float64, have no signal to noise ratio.
        self._signal = {name: power for name, power in signal.items() if 0.0 < power < math.inf}

    @property
    def count(self) -> int:
        """The number of samples."""
        return len(self._samples)

    def errors(self, assignment: Assignment, samples: SampleSelection = ALL) -> NDArray[np.float64]:
        """e_s of `calibration.auto` against the float model for each of `samples`."""
        numbers = self._numbers(samples)
        return self._summed([self._noise(assignment, number) for number in numbers])

    def own_errors(
        self, assignment: Assignment, samples: SampleSelection = ALL
    ) -> NDArray[np.float64]:
        """e_s against the model whose weights alone are INT8."""
        return self._summed(
            [
                _noise_between(self._run(assignment, number), self._weights_only[number])
                for number in self._numbers(samples)
            ]
        )

    def of_model(self, trial: TrialModel) -> "OutputNoise":
        """The noise of a changed model against the same float outputs."""
        return OutputNoise(trial, self._samples, self.exact, self._as_judged, self.always_float)

    def with_float(self, nodes: frozenset[str]) -> "OutputNoise":
        """The noise with some nodes in floating point in every trial."""
        return OutputNoise(self.trial, self._samples, self.exact, self._as_judged, nodes)

    @cached_property
    def _weights_only(self) -> tuple[Outputs, ...]:
        return tuple(
            self._parts(self.trial({}, sample, self.always_float)) for sample in self._samples
        )

    def sqnr_db(
        self, assignment: Assignment, keep_float: frozenset[str], samples: SampleSelection = ALL
    ) -> dict[str, float]:
        """SQNR by part in dB, over the selected samples."""
        noise = dict.fromkeys(self._signal, 0.0)
        signal = dict.fromkeys(self._signal, 0.0)
        for number in self._numbers(samples):
            noise_of = self._noise(assignment, number, keep_float)
            for name in noise:
                noise[name] += noise_of[name]
                signal[name] += _power(self.exact[number][name])
        return {name: sqnr_db(signal[name], noise[name]) for name in noise}

    def compared(
        self, assignment: Assignment, keep_float: frozenset[str], samples: SampleSelection = ALL
    ) -> tuple[list[Outputs], list[Outputs]]:
        """Float and INT8 outputs of each selected sample, by part."""
        numbers = self._numbers(samples)
        actual = [self._run(assignment, number, keep_float) for number in numbers]
        return [self.exact[number] for number in numbers], actual

    def judged(
        self,
        assignment: Assignment,
        keep_float: frozenset[str] = NO_NODES,
        samples: SampleSelection = ALL,
    ) -> Judgement:
        """Judge the selected samples, held out from the ranges (`as_judged`)."""
        exact, actual = self.compared(assignment, keep_float, samples)
        return judge(self.trial.parts, exact, actual, basis="held out")

    def selected(
        self, samples: SampleSelection = ALL
    ) -> tuple[tuple[dict[str, NDArray[Any]], Outputs], ...]:
        """The selected samples and their float outputs by part."""
        return tuple((dict(self._samples[n]), self.exact[n]) for n in self._numbers(samples))

    def _run(
        self, assignment: Assignment, number: int, keep_float: frozenset[str] = NO_NODES
    ) -> Outputs:
        """Outputs of a sample by part; those of the latest ranges are held."""
        keep_float = keep_float | self.always_float
        key = (frozenset(assignment.items()), keep_float)
        if key != self._latest[:2]:
            self._latest = (*key, {})
        outputs = self._latest[2]
        if number not in outputs:
            ranges = self._as_judged(assignment, number)
            outputs[number] = self._parts(self.trial(ranges, self._samples[number], keep_float))
        return outputs[number]

    def _parts(self, outputs: Outputs) -> dict[str, NDArray[Any]]:
        return split_outputs(self.trial.parts, outputs)

    def _numbers(self, samples: SampleSelection) -> list[int]:
        return [int(number) for number in np.arange(len(self._samples))[samples]]

    def error(
        self,
        assignment: Assignment,
        keep_float: frozenset[str],
        samples: SampleSelection = ALL,
        names: Collection[str] | None = None,
    ) -> float:
        """Error at the outputs in units of the targets (`toolkit.quantize.loss.judge.error_of`).

        `names`: of the parts, None: all.
        """
        parts = [part for part in self.trial.parts if names is None or part.name in names]
        return error_of(parts, *self.compared(assignment, keep_float, samples))

    def cosine(
        self, assignment: Assignment, keep_float: frozenset[str], samples: SampleSelection = ALL
    ) -> dict[str, float]:
        """Cosine similarity by part, over the selected samples as one vector."""
        product, power = dict.fromkeys(self._signal, 0.0), dict.fromkeys(self._signal, 0.0)
        signal = dict.fromkeys(self._signal, 0.0)
        for exact, actual in zip(*self.compared(assignment, keep_float, samples), strict=True):
            for name in product:
                before, after = comparable(exact[name], actual[name])
                finite = np.isfinite(before)
                array = after[finite]
                product[name] += float(np.vdot(array, before[finite]))
                power[name] += _power(array)
                signal[name] += _power(exact[name])
        return {
            name: product[name] / math.sqrt(power[name] * signal[name])
            if power[name] * signal[name]
            else 0.0
            for name in product
        }

    def _noise(
        self, assignment: Assignment, number: int, keep_float: frozenset[str] = NO_NODES
    ) -> Mapping[str, float]:
        """Power of the error of each part in one sample; the same trial is run once."""
        key = (frozenset(assignment.items()), number, frozenset(keep_float))
        if key not in self._known:
            outputs = self._run(assignment, number, keep_float)
            self._known[key] = _noise_between(outputs, self.exact[number])
        return self._known[key]

    def _summed(self, noises: Sequence[Mapping[str, float]]) -> NDArray[np.float64]:
        """e_s of `calibration.auto` for each sample."""
        share = {name: len(self._samples) / signal for name, signal in self._signal.items()}
        return np.array(
            [sum(noise[name] * factor for name, factor in share.items()) for noise in noises]
        )


def _as_requested(assignment: Assignment, number: int) -> Assignment:
    return assignment


def int8_macs(model: ir.Model) -> dict[str, float]:
    """MACs of each node that can be INT8, by name; 0 if shapes are unknown."""
    return {str(node.name): float(view(node).macs or 0) for node, _ in int8_nodes(model)}


@dataclass(frozen=True)
class Material:
    """What metrics measure on.

    `noise` on the selected `samples`, each with the ranges that it is judged with. `detector`,
    `held_out`: how to decode the outputs, and labelled images.
    """

    noise: OutputNoise
    samples: SampleSelection = field(default_factory=lambda: ALL)
    detector: ModelConfig | None = None
    held_out: "HeldOut | None" = None


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of METRICS. `float_value`: the metric of the float model, None: measure it."""

    name: str
    unit: str
    summary: str
    build: Callable[[Material], Measure]
    float_value: float | None = None


def _sqnr(material: Material) -> Measure:
    noise, samples = material.noise, material.samples
    return lambda ranges, keep: min(noise.sqnr_db(ranges, keep, samples).values(), default=math.inf)


def _cosine(material: Material) -> Measure:
    noise, samples = material.noise, material.samples
    return lambda ranges, keep: min(noise.cosine(ranges, keep, samples).values(), default=1.0)


def _margin(material: Material) -> Measure:
    noise, samples = material.noise, material.samples
    return lambda ranges, keep: 1.0 - noise.judged(ranges, keep, samples).spent


def _target(material: Material) -> Measure:
    noise, samples = material.noise, material.samples
    return lambda ranges, keep: 1.0 - noise.judged(ranges, keep, samples).target_spent


def _map50(material: Material) -> Measure:
    detector, held_out = material.detector, material.held_out
    if detector is None or held_out is None:
        raise CalibrationError(
            "map50 needs to know how detections are read and what the pictures truly show: give a "
            "detector's model file with a folder that holds the truth, or take sqnr or cosine"
        )
    from toolkit.quantize.trials.score import score  # the decoders of pipelines

    trial = material.noise.trial
    (name,) = trial.inputs

    def measure(assignment: Assignment, keep_float: frozenset[str]) -> float:
        def infer(blob: NDArray[np.float32]) -> Outputs:
            return trial(assignment, {name: blob}, keep_float)

        return 100.0 * score(infer, detector, held_out, _silent).map50

    return measure


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        metric.name: metric
        for metric in (
            Metric("sqnr", "dB", "signal to noise of the worst output", _sqnr, math.inf),
            Metric("cosine", "", "cosine of the worst output with the float one", _cosine, 1.0),
            Metric(
                "margin", "", "1 - the largest share of a limit that a loss spends", _margin, 1.0
            ),
            Metric(
                "target", "", "1 - the largest share of a target that a loss spends", _target, 1.0
            ),
            Metric("map50", "points", "mAP50 on pictures whose truth is known, 0 to 100", _map50),
        )
    }
)


def _noise_between(outputs: Outputs, exact: Outputs) -> dict[str, float]:
    return {name: powers(array, outputs[name])[1] for name, array in exact.items()}


def _power(array: NDArray[Any]) -> float:
    return powers(array, array)[0]


def _silent(share: float) -> None:
    """Discard progress."""
