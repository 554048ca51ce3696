"""Data -> calibration table: by one method, by what helps at the outputs, within a budget.

One pass observes every activation. A method makes an amax of each histogram; `auto` tries what all
methods propose, tensor by tensor, on samples that the histograms did not see; a budget keeps nodes
in floating point until a metric holds. What INT8 then costs is measured at each output.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import onnx_ir as ir
from msgspec.structs import replace

from calibration.auto import AutoResult, choose_ranges
from calibration.budget import Budget, BudgetResult, largest_int8_share
from calibration.calibrate import Checkpoint, Observation, observe_tensors
from calibration.dataset import Dataset, Sample, Skipped
from calibration.errors import CalibrationError
from calibration.observer import Histogram
from calibration.table import CalibrationTable
from calibration.threshold import METHODS, amax_by_method, method_named
from pipelines.config import ModelConfig, PreprocessConfig
from toolkit.int8.data import Source, input_specs, open_data
from toolkit.int8.metrics import METRICS, Material, OutputNoise, int8_macs
from toolkit.int8.observe import ActivationRunner, opencv_counts
from toolkit.int8.quantize import calibrated_tensors, with_operands
from toolkit.int8.trial import TrialModel
from toolkit.score import HeldOut, load_held_out

AUTO = "auto"
VALIDATION_EVERY = 3  # of the samples one in so many is kept for trials
MAX_VALIDATION = 32  # more hardly changes a choice, and every trial runs them all

Report = Callable[[str, float], None]
"""Called with the step's name and the share of it that is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class RangeOptions:
    """How ranges are found.

    `method`: a row of METHODS, with a parameter after a colon where it takes one, or "auto".
    `samples`: how many are used, None: all. `preprocess` says how pictures become the input, None:
    letterbox to the input's size, RGB, 0 to 1.
    `detector` and its labels let a budget measure mAP50 on the scenes that ship with Tandem.
    `resume`: a file that keeps the observation on the way (see `calibration.calibrate`).
    """

    method: str = "entropy"
    samples: int | None = None
    preprocess: PreprocessConfig | None = None
    budget: Budget | None = None
    resume: Path | None = None
    detector: ModelConfig | None = None
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ranges:
    """A table, how it came about, and what it costs.

    `sqnr_db`: signal to noise of each output in dB with these ranges; `single_db` the same figure,
    over all outputs, of each method alone where `auto` measured it. `unseen`: whether the samples
    behind those figures were kept out of the histograms. `candidates`: method -> tensor -> amax.
    """

    table: CalibrationTable
    asked: int
    samples: int
    skipped: tuple[Skipped, ...]
    dead: tuple[str, ...]
    constant: tuple[str, ...]
    histograms: Mapping[str, Histogram]
    candidates: Mapping[str, Mapping[str, float]]
    sqnr_db: Mapping[str, float]
    unseen: bool
    sample: Sample
    auto: AutoResult | None = None
    budget: BudgetResult | None = None
    validation: tuple[Sample, ...] = field(default=(), repr=False)


def measure_ranges(
    graph: ir.Model, source: Source, model_sha256: str, options: RangeOptions, report: Report
) -> Ranges:
    """Find the ranges of every activation of a graph that has gone through the passes.

    Raises TandemError: the data do not fit, hold NaN or infinities, or a method is unknown.
    """
    search = options.method == AUTO or options.budget is not None
    if options.method != AUTO:
        method_named(options.method)  # refused before hours of running
    data = _Split(
        open_data(source, input_specs(graph), options.preprocess, options.samples), search
    )
    tensors = calibrated_tensors(graph)
    seen = observe_tensors(
        ActivationRunner(graph, tensors),
        data,
        tensors,
        lambda done, total: report("calibrate", done / max(total, 1)),
        None if options.resume is None else Checkpoint(options.resume, model_sha256),
        count=opencv_counts,
    )
    methods = tuple(METHODS) if options.method == AUTO else (options.method,)
    candidates = amax_by_method(seen.histograms, methods)
    trial = TrialModel(graph)
    validation = data.validation
    noise = OutputNoise(trial, validation)
    auto = _search(trial, noise, candidates, report) if options.method == AUTO else None
    amax = candidates[methods[0]] if auto is None else {**candidates[auto.best_single], **auto.amax}
    material = Material(trial, validation, options.detector, _held_out(options))
    budget = _spend(graph, material, amax, options.budget, report) if options.budget else None
    keep = budget.keep_float if budget is not None else frozenset()
    return Ranges(
        table=_table(
            options,
            seen,
            data_sha256=data.sha256(),
            model_sha256=model_sha256,
            amax=with_operands(graph, amax),
            auto=auto,
            keep=keep,
        ),
        asked=data.asked,
        samples=seen.samples,
        skipped=seen.skipped,
        dead=tuple(name for name, found in seen.histograms.items() if found.dead),
        constant=tuple(
            name for name, found in seen.histograms.items() if found.constant and not found.dead
        ),
        histograms=seen.histograms,
        candidates=MappingProxyType(candidates),
        sqnr_db=noise.sqnr_db({name: amax[name] for name in trial.tensors}, keep),
        unseen=data.unseen,
        sample=validation[0],
        auto=auto,
        budget=budget,
        validation=validation,
    )


class _Split:
    """A data set without every third sample, which are kept for trials.

    Where nothing is tried, or the samples are too few to spare any, all are observed, and the
    first of them serve as validation too.
    """

    def __init__(self, data: Dataset, wanted: bool) -> None:
        self._data = data
        self.unseen = wanted and len(data) >= 2 * VALIDATION_EVERY
        self._kept: dict[int, Sample] = {}

    @property
    def asked(self) -> int:
        return self._data.asked

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        return self._data.skipped

    @property
    def validation(self) -> tuple[Sample, ...]:
        """The samples of the latest pass that trials may use."""
        return tuple(self._kept.values())

    def __len__(self) -> int:
        count = len(self._data)
        return count - count // VALIDATION_EVERY if self.unseen else count

    def __iter__(self) -> Iterator[Sample]:
        self._kept.clear()
        for number, sample in enumerate(self._data):
            mine = not self.unseen or number % VALIDATION_EVERY == VALIDATION_EVERY - 1
            if mine and len(self._kept) < MAX_VALIDATION:
                # A copy: a loader may write the next sample into the same memory.
                self._kept[number] = {name: array.copy() for name, array in sample.items()}
            if not self.unseen or not mine:
                yield sample

    def sha256(self) -> str:
        return self._data.sha256()


def _search(
    trial: TrialModel,
    noise: OutputNoise,
    candidates: Mapping[str, Mapping[str, float]],
    report: Report,
) -> AutoResult:
    by_tensor = {
        tensor: {method: found[tensor] for method, found in candidates.items()}
        for tensor in trial.tensors
    }
    return choose_ranges(
        by_tensor,
        noise.errors,
        noise.own_errors,
        on_progress=lambda done, total: report("choose ranges", done / max(total, 1)),
    )


def _spend(
    graph: ir.Model,
    material: Material,
    amax: Mapping[str, float],
    budget: Budget,
    report: Report,
) -> BudgetResult:
    metric = METRICS.get(budget.metric)
    if metric is None:
        raise CalibrationError(
            f"there is no metric '{budget.metric}' for a budget: take one of {', '.join(METRICS)}"
        )
    trial = material.trial
    ranges = {name: amax[name] for name in trial.tensors}
    measure = metric.build(material)
    fine = METRICS["sqnr"].build(material)
    return largest_int8_share(
        int8_macs(graph),
        lambda keep: measure(ranges, keep),
        budget,
        fine=lambda keep: fine(ranges, keep),
        on_progress=lambda done, total: report("spend the budget", done / max(total, 1)),
    )


def _held_out(options: RangeOptions) -> HeldOut | None:
    wanted = options.budget is not None and options.budget.metric == "map50"
    return load_held_out(options.labels) if wanted and options.detector is not None else None


def _table(
    options: RangeOptions,
    seen: Observation,
    *,
    data_sha256: str,
    model_sha256: str,
    amax: Mapping[str, float],
    auto: AutoResult | None,
    keep: frozenset[str],
) -> CalibrationTable:
    table = CalibrationTable(
        method=options.method,
        samples=seen.samples,
        data_sha256=data_sha256,
        model_sha256=model_sha256,
        tensors=dict(amax),
        keep_float=tuple(sorted(keep)),
    )
    if auto is None:
        return table
    rest = dict.fromkeys(set(amax) - set(auto.amax), auto.best_single)
    return replace(table, methods={**{c.tensor: c.method for c in auto.choices}, **rest})


DUMMY_AMAX = 4.0
"""What stands in for a range that nobody measured; trtexec takes 2 and 4 where it has none."""


def dummy_table(graph: ir.Model, model_sha256: str) -> CalibrationTable:
    """A table of stand-ins: INT8 with it has the right speed and wrong results."""
    return CalibrationTable(
        method="minmax",
        samples=0,
        data_sha256="0" * 64,
        model_sha256=model_sha256,
        tensors=with_operands(graph, dict.fromkeys(calibrated_tensors(graph), DUMMY_AMAX)),
        dummy=True,
    )
