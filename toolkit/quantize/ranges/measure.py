"""Data -> calibration table: by one method, by what helps at the outputs, within a budget.

1 observe      every activation, in two parts       calibration.calibrate
2 fit          histograms -> amax, by each method   toolkit.quantize.ranges.fit
3 equalise     other weights, observed again        toolkit.quantize.corrections.steps     optional
4 choose       `auto`: tensor by tensor, by trying  calibration.auto       optional
5 budget       nodes that stay in floating point    toolkit.quantize.trials.spend     optional
6 correct      biases, for these very ranges        toolkit.quantize.corrections.steps     optional

What INT8 costs is measured at each output. Wherever anything is chosen by it, the samples are in
two parts: each is judged with the ranges that the methods find in the other, and what changes
weights learns from the first part and is judged by the second (`toolkit.quantize.ranges.split`).
The ranges that are written come from all samples.
"""

import difflib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
import onnx_ir as ir
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from calibration.auto import AutoResult
from calibration.budget import Budget, BudgetResult
from calibration.calibrate import Checkpoint, Observation, Run
from calibration.channels import ChannelWatch, DeadChannels
from calibration.dataset import Sample, Skipped, memory_dataset
from calibration.errors import CalibrationError
from calibration.observer import Histogram
from calibration.state import read_state
from calibration.table import Adjustments, CalibrationTable
from calibration.threshold import method_named
from pipelines.config import ModelConfig, PreprocessConfig
from toolkit.quantize.corrections.steps import (
    CORRECTION,
    CORRECTION_SAMPLES,
    EQUALISATION,
    End,
    Rows,
    Step,
    Switch,
    corrected,
    corrected_graph,
    end_of,
    equalised,
)
from toolkit.quantize.gpu_rounding import operands_on_gpu
from toolkit.quantize.quantize import calibrated_tensors, with_operands
from toolkit.quantize.ranges.data import Source, input_specs, open_data
from toolkit.quantize.ranges.fit import (
    AUTO_METHODS,
    Fit,
    Halves,
    Outputs,
    fit,
    joined,
    searched,
)
from toolkit.quantize.ranges.observe import observe_run, shared_run
from toolkit.quantize.ranges.split import LEAST, Split
from toolkit.quantize.trials.spend import Spending, overspent, spend

AUTO = "auto"
DUMMY_AMAX = 4.0
"""What stands in for a range that nobody measured; trtexec takes 2 and 4 where it has none."""
_NO_ROWS: Rows = MappingProxyType({})

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
    `equalise` and `correct_biases`: steps that change weights (`toolkit.quantize.corrections`).
    None: "auto", by measured benefit, where a search runs anyway (method "auto", a budget), else
    "off".
    `keep_float`: nodes that stay in floating point whatever a budget says.
    `on_gpu`: a GPU runs all nodes, and what INT8 costs is measured as it rounds
    (`toolkit.quantize.gpu_rounding`).
    """

    method: str = "entropy"
    samples: int | None = None
    preprocess: PreprocessConfig | None = None
    budget: Budget | None = None
    resume: Path | None = None
    detector: ModelConfig | None = None
    labels: tuple[str, ...] = ()
    equalise: Switch | None = None
    correct_biases: Switch | None = None
    keep_float: frozenset[str] = frozenset()
    on_gpu: bool = False

    @property
    def search(self) -> bool:
        """Whether anything is chosen by trying, on samples kept for it."""
        return self.method == AUTO or self.budget is not None

    def asked(self, step: Switch | None) -> Switch:
        """What a step is: as asked for, or the default."""
        return step or ("auto" if self.search else "off")


@dataclass(frozen=True)
class Ranges:
    """A table, how it came about, and what it costs.

    `end`: the graph that the ranges belong to, with the weights that optional `steps` gave it, and
    what measures INT8 of it. `unseen`: whether choices were judged on samples with ranges from
    others. `candidates`: method -> tensor -> amax.
    `dead`, `constant`: tensors that were zero, or one number, in all samples; `dead_channels`:
    those of other tensors in `channel_samples` samples, all unless an observation was resumed.
    """

    table: CalibrationTable
    end: End = field(repr=False)
    asked: int
    samples: int
    skipped: tuple[Skipped, ...]
    dead: tuple[str, ...]
    constant: tuple[str, ...]
    dead_channels: Mapping[str, DeadChannels]
    channel_samples: int
    histograms: Mapping[str, Histogram]
    candidates: Mapping[str, Mapping[str, float]]
    unseen: bool
    sample: Sample
    steps: tuple[Step, ...] = ()
    auto: AutoResult | None = None
    budget: BudgetResult | None = None

    @property
    def model(self) -> ir.Model:
        """The graph that the ranges belong to."""
        return self.end.graph

    @property
    def sqnr_db(self) -> Mapping[str, float]:
        """Signal to noise of each output in dB with these ranges."""
        return self.end.sqnr_db


def measure_ranges(
    graph: ir.Model, source: Source, model_sha256: str, options: RangeOptions, report: Report
) -> Ranges:
    """Find the ranges of every activation of a graph that has gone through the passes.

    Raises TandemError: the data do not fit, hold NaN or infinities, or a method is unknown.
    """
    if options.method != AUTO:
        method_named(options.method)  # refused before hours of running
    _refuse_unknown(options.keep_float, graph)
    _refuse_one_pass(source, options)
    job = _opened(graph, source, model_sha256, options, report)
    keep = None if options.resume is None else Checkpoint(options.resume, model_sha256)
    watch = ChannelWatch(shared_run(graph, job.tensors))
    seen = _observe(job, watch, keep)
    judges = _Judges(job.data.validation, job.data.held)
    data_sha256 = job.data.sha256()
    found, factors, equalisation = _equalise(job, judges, _fit(job, judges, graph, seen))
    learning = job.data.first(CORRECTION_SAMPLES) if job.corrects else ()
    found = _choose(job, found, learning)
    spending = _spending(options, judges)
    budget = None
    if spending is not None:
        budget = spend(found, spending, _share(report, "spend the budget"))
    spent = frozenset() if budget is None else budget.keep_float
    end = end_of(found, options.keep_float | spent)
    end, correction = _correct(job, found, end, learning, _allowed(budget, spending))
    return Ranges(
        table=_table(
            options,
            found,
            samples=found.seen.samples,
            data_sha256=data_sha256,
            model_sha256=model_sha256,
            keep=end.keep_float,
            adjusted=_adjustments(factors, end.changes),
        ),
        end=end,
        asked=job.data.asked,
        samples=found.seen.samples,
        skipped=seen.skipped,
        dead=tuple(name for name, one in seen.histograms.items() if one.dead),
        constant=tuple(
            name for name, one in seen.histograms.items() if one.constant and not one.dead
        ),
        dead_channels=MappingProxyType(watch.dead),
        channel_samples=watch.samples,
        histograms=found.seen.histograms,
        candidates=MappingProxyType(dict(found.candidates)),
        unseen=job.data.unseen,
        sample=judges.validation[0],
        steps=tuple(step for step in (equalisation, correction) if step is not None),
        auto=found.auto,
        budget=budget,
    )


@dataclass(frozen=True, slots=True)
class _Job:
    """What is asked, of which graph; `tensors` of it get ranges from `data`."""

    graph: ir.Model
    tensors: Sequence[str]
    source: Source
    data: Split
    options: RangeOptions
    model_sha256: str
    report: Report

    @property
    def methods(self) -> Sequence[str]:
        return AUTO_METHODS if self.options.method == AUTO else (self.options.method,)

    @property
    def corrects(self) -> bool:
        """Whether the correction of biases is tried."""
        asked = self.options.asked(self.options.correct_biases)
        return asked == "on" or (asked == "auto" and not _why_not(self.source, self.data))


@dataclass(frozen=True, slots=True)
class _Judges:
    """The samples that choices are made by; those of the numbers `held` are in no first pass."""

    validation: Sequence[Sample]
    held: NDArray[np.intp]


def _opened(
    graph: ir.Model, source: Source, model_sha256: str, options: RangeOptions, report: Report
) -> _Job:
    """Open the samples, in two parts where anything is chosen by them."""
    asked = (options.asked(options.equalise), options.asked(options.correct_biases))
    data = Split(
        open_data(source, input_specs(graph), options.preprocess, options.samples),
        options.search or asked != ("off", "off"),
    )
    return _Job(graph, calibrated_tensors(graph), source, data, options, model_sha256, report)


def _observe(job: _Job, run: Run, keep: Checkpoint | None) -> Observation:
    """Step 1."""
    return observe_run(run, job.data, job.tensors, _share(job.report, "calibrate"), keep)


def _fit(
    job: _Job,
    judges: _Judges,
    graph: ir.Model,
    first: Observation,
    exact: Sequence[Outputs] | None = None,
) -> Fit:
    """Step 2; the samples that the first pass left out are observed here."""
    nodes = {str(node.name) for node in graph.graph} if job.options.on_gpu else frozenset[str]()
    operands = operands_on_gpu(graph, nodes, job.options.keep_float)
    if not job.data.unseen:
        return fit(graph, first, job.methods, judges.validation, exact=exact, operands=operands)
    rest = memory_dataset([judges.validation[number] for number in judges.held])
    run = shared_run(graph, job.tensors)
    other = observe_run(run, rest, job.tensors, _share(job.report, "calibrate"), None)
    halves = Halves(first.histograms, other.histograms, judges.held)
    both = joined(first, other)
    return fit(
        graph,
        both,
        job.methods,
        judges.validation,
        exact=exact,
        halves=halves,
        operands=operands,
    )


def _equalise(job: _Job, judges: _Judges, plain: Fit) -> tuple[Fit, Rows, Step | None]:
    """Step 3: the fit to go on with, its factors by tensor, and what became of the step."""
    asked = job.options.asked(job.options.equalise)
    if asked == "off":
        return plain, _NO_ROWS, None
    why_not = _why_not(job.source, job.data)
    if asked == "auto" and why_not:
        return plain, _NO_ROWS, Step(EQUALISATION, "auto", False, reason=why_not)

    def refit(changed: ir.Model, rows: Rows) -> Fit:
        keep = _checkpoint_of(job.options.resume, job.model_sha256, rows)
        anew = _observe(job, shared_run(changed, job.tensors), keep)
        return _fit(job, judges, changed, anew, plain.noise.exact)

    return equalised(plain, job.data, refit, asked)


def _choose(job: _Job, found: Fit, learning: Sequence[Sample]) -> Fit:
    """Step 4, where `auto` is asked for."""
    if job.options.method != AUTO:
        return found
    correct = partial(corrected_graph, samples=learning) if job.corrects else None
    return searched(found, correct, _share(job.report, "choose ranges"))


def _correct(
    job: _Job,
    found: Fit,
    end: End,
    learning: Sequence[Sample],
    forbidden: Callable[[End], str],
) -> tuple[End, Step | None]:
    """Step 6."""
    asked = job.options.asked(job.options.correct_biases)
    if job.corrects:
        return corrected(
            found,
            end,
            asked,
            samples=learning,
            forbidden=forbidden,
            on_progress=_share(job.report, "correct biases"),
        )
    if asked == "off":
        return end, None
    why_not = _why_not(job.source, job.data)
    return end, Step(CORRECTION, "auto", False, reason=why_not)


def _share(report: Report, step: str) -> Callable[[int, int], None]:
    """Progress as (done, total)."""
    return lambda done, total: report(step, done / max(total, 1))


def _refuse_unknown(nodes: frozenset[str], graph: ir.Model) -> None:
    known = {str(node.name) for node in graph.graph}
    for name in sorted(nodes - known):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise CalibrationError(
            f"there is no node {name!r} to keep in floating point{hint}: `tandem plan --nodes` "
            "lists the nodes"
        )


def _refuse_one_pass(source: Source, options: RangeOptions) -> None:
    """Refuse steps that were asked for but could not have the samples they need."""
    if isinstance(source, Iterator) and "on" in (options.equalise, options.correct_biases):
        raise CalibrationError(
            "equalisation and bias correction read the samples again, but an iterator gives them "
            "once: give a list, or an object that makes a new iterator each time"
        )


def _why_not(source: Source, data: Split) -> str:
    """Why a step cannot be judged, "" if it can."""
    if isinstance(source, Iterator):
        return "it reads the samples again, but an iterator gives them once"
    if data.unseen:
        return ""
    if len(data) >= LEAST:  # an iterable without a length: known after the first pass only
        return "samples without a known number leave none unseen to measure it on: give a list"
    return f"{len(data)} samples are too few to measure it on unseen ones: give at least {LEAST}"


def _checkpoint_of(resume: Path | None, model_sha256: str, rows: Rows) -> Checkpoint | None:
    """The file beside `resume` for an equalised model; one of other factors is begun anew."""
    if resume is None:
        return None
    path = resume.with_name(f"{resume.name}.equalised")
    sha256 = hashlib.sha256(model_sha256.encode() + msgspec.json.encode(rows)).hexdigest()
    if path.exists() and read_state(path).model_sha256 != sha256:
        path.unlink()
    return Checkpoint(path, sha256)


def _spending(options: RangeOptions, judges: _Judges) -> Spending | None:
    """What the budget is spent by; None without a budget."""
    if options.budget is None:
        return None
    return Spending(
        options.budget, judges.validation, options.keep_float, options.detector, options.labels
    )


def _allowed(spent: BudgetResult | None, spending: Spending | None) -> Callable[[End], str]:
    """Whether a budget that was met is met still: why not, or ""."""
    if spent is None or spending is None:
        return lambda end: ""
    return partial(overspent, spent, spending)


def _table(
    options: RangeOptions,
    found: Fit,
    *,
    samples: int,
    data_sha256: str,
    model_sha256: str,
    keep: frozenset[str],
    adjusted: Adjustments | UnsetType,
) -> CalibrationTable:
    auto, methods = found.auto, dict[str, str]()
    if auto is not None:
        rest = dict.fromkeys(set(found.amax) - set(auto.amax), auto.start)
        methods = {**{choice.tensor: choice.method for choice in auto.choices}, **rest}
    return CalibrationTable(
        format=2 if adjusted else 1,
        method=options.method,
        samples=samples,
        data_sha256=data_sha256,
        model_sha256=model_sha256,
        tensors=dict(found.amax),
        methods=methods,
        keep_float=tuple(sorted(keep)),
        adjusted=adjusted,
    )


def _adjustments(factors: Rows, changes: Rows) -> Adjustments | UnsetType:
    if not factors and not changes:
        return UNSET
    return Adjustments(equalised=dict(factors), biases=dict(changes))


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
