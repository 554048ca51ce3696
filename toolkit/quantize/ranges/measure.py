"""Data -> calibration table: by one method, by trials of several, within an accuracy budget.

1 observe   every activation, in two halves     calibration.calibrate
2 fit       histograms -> amax, by each method  toolkit.quantize.ranges.fit
3 equalise  rescaled weights, observed again    toolkit.quantize.corrections (optional)
4 choose    `auto`: trials tensor by tensor     calibration.auto (optional)
5 budget    nodes that stay in floating point   toolkit.quantize.trials.budget (optional)
6 correct   biases, for the final ranges        toolkit.quantize.corrections (optional)
7 judge     what the outputs lose               toolkit.quantize.loss

INT8 error is measured at each output, on samples that are held out: they are judged with the ranges
that the methods give on the others (`toolkit.quantize.ranges.split`). If it decides anything, the
samples are in two halves that judge each other, and corrections are computed on the first half and
judged on the second. The ranges that are written come from all samples.
"""

import difflib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from calibration.table import Adjustments, CalibrationTable, format_of
from calibration.threshold import method_named
from device.engine.preprocessing import Preprocessing
from pipelines.config import ModelConfig
from toolkit.importers.onnx import ImportedModel
from toolkit.quantize.corrections.corrections import (
    CORRECTION,
    CORRECTION_SAMPLES,
    EQUALISATION,
    CorrectionOutcome,
    FinalFit,
    Rows,
    Switch,
    corrected_graph,
    final_fit,
    try_bias_correction,
    try_equalisation,
)
from toolkit.quantize.gpu_operands import operands_on_gpu
from toolkit.quantize.loss.judge import Judgement, judge
from toolkit.quantize.preprocess.decide import Decision, Stated
from toolkit.quantize.preprocess.known import Hint, known_preprocessing
from toolkit.quantize.quantize import calibrated_tensors, with_operands
from toolkit.quantize.ranges.data import Source, input_specs, open_data, preprocessing_of
from toolkit.quantize.ranges.first_layer import FirstLayer, first_layer, remark
from toolkit.quantize.ranges.fit import (
    AUTO_METHODS,
    Fit,
    Halves,
    Outputs,
    fit,
    loses_no_more,
    merge_observations,
    search_ranges,
    spent_shares,
    widest_fit,
)
from toolkit.quantize.ranges.observe import observe_run, shared_runner
from toolkit.quantize.ranges.split import MIN_SAMPLES, Split
from toolkit.quantize.trials.budget import BudgetSearch, budget_violation, find_budget

AUTO = "auto"
DUMMY_AMAX = 4.0
"""Range of a tensor that was not measured; trtexec uses 2 and 4."""
WORSE = "minmax without it loses less of the scores, boxes or classes"
_NO_ROWS: Rows = MappingProxyType({})

Report = Callable[[str, float], None]
"""Called with the name of the step and its progress, 0 to 1."""


@dataclass(frozen=True, slots=True)
class RangeOptions:
    """How ranges are found.

    `method`: a row of METHODS, with a parameter after a colon where it takes one, or "auto".
    `samples`: how many are used, None: all. `preprocess`: image -> input, as far as the user says;
    `suggested`: what the model's file says of it (`toolkit.quantize.preprocess`).
    `first_layer`: of the imported model; the inputs are compared with it.
    `detector` and its labels let a budget measure mAP50 on the scenes that ship with Tandem.
    `resume`: checkpoint file of the observation (see `calibration.calibrate`).
    `equalise` and `correct_biases`: corrections of weights (`toolkit.quantize.corrections`).
    None: "auto" (by measured benefit) if a search runs anyway (method "auto", a budget), else
    "off".
    `keep_float`: nodes that stay in floating point whatever a budget says.
    `on_gpu`: all nodes run on a GPU, and INT8 error is measured with the operands that it reads in
    INT8 (`toolkit.quantize.gpu_operands`).
    """

    method: str = AUTO
    samples: int | None = None
    preprocess: Stated | Preprocessing | None = None
    suggested: Hint | None = None
    first_layer: FirstLayer | None = field(default=None, repr=False)
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
        """True if trials on held-out samples choose anything."""
        return self.method == AUTO or self.budget is not None

    def switch(self, correction: Switch | None) -> Switch:
        """A correction as requested, or its default."""
        return correction or ("auto" if self.search else "off")


def with_model(options: RangeOptions, imported: ImportedModel) -> RangeOptions:
    """Return the options with what the model's file says about its images."""
    return replace(
        options,
        suggested=known_preprocessing(imported.name, imported.origin),
        first_layer=first_layer(imported.model),
    )


@dataclass(frozen=True)
class Ranges:
    """A calibration table, with its graph, error and statistics.

    `fit`: the graph of the ranges, with weights changed by `corrections`, and its INT8 error.
    `judgement`: what the outputs lose, on the samples and FP32 outputs (by part) of `judges`.
    `candidates`: method -> tensor -> amax.
    `preprocessing`: image -> input; None: not known, as the samples are arrays. `remarks`: what
    about the inputs looks wrong.
    `dead`, `constant`: tensors that were zero, or one value, in all samples; `dead_channels`:
    zero channels of other tensors in `channel_samples` samples, all unless observation was resumed.
    """

    table: CalibrationTable
    fit: FinalFit = field(repr=False)
    requested: int
    samples: int
    skipped: tuple[Skipped, ...]
    dead: tuple[str, ...]
    constant: tuple[str, ...]
    dead_channels: Mapping[str, DeadChannels]
    channel_samples: int
    histograms: Mapping[str, Histogram]
    candidates: Mapping[str, Mapping[str, float]]
    judgement: Judgement
    judges: Sequence[tuple[Sample, Outputs]] = field(repr=False)
    preprocessing: Decision | None = None
    remarks: tuple[str, ...] = ()
    corrections: tuple[CorrectionOutcome, ...] = ()
    auto: AutoResult | None = None
    budget: BudgetResult | None = None

    @property
    def model(self) -> ir.Model:
        """The graph that the ranges belong to."""
        return self.fit.graph

    @property
    def sample(self) -> Sample:
        """A sample that the model has run."""
        return self.judges[0][0]

    @property
    def sqnr_db(self) -> Mapping[str, float]:
        """Signal to noise of each output in dB with these ranges."""
        return self.fit.sqnr_db


def measure_ranges(
    graph: ir.Model, source: Source, model_sha256: str, options: RangeOptions, report: Report
) -> Ranges:
    """Find the ranges of every activation of a graph that has gone through the passes.

    Raises TandemError: the data do not fit, hold NaN or infinities, or a method is unknown.
    """
    if options.method != AUTO:
        method_named(options.method)  # fails before hours of running
    _refuse_unknown(options.keep_float, graph)
    _refuse_one_pass(source, options)
    job = _opened(graph, source, model_sha256, options, report)
    checkpoint = None if options.resume is None else Checkpoint(options.resume, model_sha256)
    watch = ChannelWatch(shared_runner(graph, job.tensors))
    observation = _observe(job, watch, checkpoint)
    judges = _Judges(job.data.validation, job.data.held_out)
    data_sha256 = job.data.sha256()
    plain = _fit(job, judges, graph, observation)
    fitted, factors, equalisation = _equalise(job, judges, plain)
    learning = job.data.first(CORRECTION_SAMPLES) if job.corrects else ()
    fitted = _choose(job, fitted, learning)
    search = _budget_search(options, judges)
    budget = None
    if search is not None:
        budget = find_budget(fitted, search, _share(report, "spend the budget"))
    budget_nodes = frozenset() if budget is None else budget.keep_float
    final = final_fit(fitted, options.keep_float | budget_nodes)
    final, correction = _correct(job, fitted, final, learning, _budget_check(budget, search))
    outcomes = tuple(outcome for outcome in (equalisation, correction) if outcome is not None)
    if job.chooses and budget is None and fitted.trial.tensors:
        widest = widest_fit(plain)
        widest_final = final_fit(widest, options.keep_float)
        if not loses_no_more(_spent(fitted, final), _spent(widest, widest_final)):
            fitted, final, factors = widest, widest_final, _NO_ROWS
            outcomes = tuple(replace(one, kept=False, reason=WORSE) for one in outcomes)
    return Ranges(
        table=_table(
            options,
            fitted,
            samples=fitted.observation.samples,
            data_sha256=data_sha256,
            model_sha256=model_sha256,
            keep_float=final.keep_float,
            adjusted=_adjustments(factors, final.changes),
            preprocessing=UNSET if job.preprocessing is None else job.preprocessing.value,
        ),
        fit=final,
        requested=job.data.requested,
        samples=fitted.observation.samples,
        skipped=observation.skipped,
        dead=tuple(name for name, histogram in observation.histograms.items() if histogram.dead),
        constant=tuple(
            name
            for name, histogram in observation.histograms.items()
            if histogram.constant and not histogram.dead
        ),
        dead_channels=MappingProxyType(watch.dead),
        channel_samples=watch.samples,
        histograms=fitted.observation.histograms,
        candidates=MappingProxyType(dict(fitted.candidates)),
        judgement=_judge(job, fitted, final),
        judges=final.noise.selected(fitted.judges),
        preprocessing=job.preprocessing,
        remarks=_remarks(options, judges),
        corrections=outcomes,
        auto=fitted.auto,
        budget=budget,
    )


@dataclass(frozen=True, slots=True)
class _Job:
    """A calibration request; `tensors` of `graph` get ranges from `data`."""

    graph: ir.Model
    tensors: Sequence[str]
    source: Source
    preprocessing: Decision | None
    data: Split
    options: RangeOptions
    model_sha256: str
    report: Report

    @property
    def methods(self) -> Sequence[str]:
        return AUTO_METHODS if self.options.method == AUTO else (self.options.method,)

    @property
    def chooses(self) -> bool:
        """True if `auto` may leave out everything that loses more than the widest ranges."""
        switches = (self.options.equalise, self.options.correct_biases)
        return self.options.method == AUTO and "on" not in switches

    @property
    def corrects(self) -> bool:
        """True if bias correction is tried."""
        switch = self.options.switch(self.options.correct_biases)
        return switch == "on" or (switch == "auto" and not _why_not(self.source, self.data))


@dataclass(frozen=True, slots=True)
class _Judges:
    """Validation samples; the first pass does not observe those at the indices `held_out`."""

    validation: Sequence[Sample]
    held_out: NDArray[np.intp]


def _opened(
    graph: ir.Model, source: Source, model_sha256: str, options: RangeOptions, report: Report
) -> _Job:
    """Open the samples, some of them held out; in two halves if they decide anything."""
    switches = (options.switch(options.equalise), options.switch(options.correct_biases))
    specs = input_specs(graph)
    preprocessing = preprocessing_of(source, specs, options.preprocess, options.suggested)
    config = None if preprocessing is None else preprocessing.config
    data = Split(
        open_data(source, specs, config, options.samples),
        options.search or switches != ("off", "off"),
    )
    tensors = calibrated_tensors(graph)
    return _Job(graph, tensors, source, preprocessing, data, options, model_sha256, report)


def _remarks(options: RangeOptions, judges: _Judges) -> tuple[str, ...]:
    sentence = remark(options.first_layer, judges.validation)
    return () if sentence is None else (sentence,)


def _observe(job: _Job, run: Run, checkpoint: Checkpoint | None) -> Observation:
    """Step 1."""
    return observe_run(run, job.data, job.tensors, _share(job.report, "calibrate"), checkpoint)


def _fit(
    job: _Job,
    judges: _Judges,
    graph: ir.Model,
    first: Observation,
    exact: Sequence[Outputs] | None = None,
) -> Fit:
    """Step 2; held-out samples are observed here."""
    nodes = {str(node.name) for node in graph.graph} if job.options.on_gpu else frozenset[str]()
    operands = operands_on_gpu(graph, nodes, job.options.keep_float)
    on_progress = _share(job.report, "try methods")
    if not judges.held_out.size:
        return fit(
            graph,
            first,
            job.methods,
            judges.validation,
            exact=exact,
            operands=operands,
            on_progress=on_progress,
        )
    held_out_data = memory_dataset([judges.validation[number] for number in judges.held_out])
    run = shared_runner(graph, job.tensors)
    held_out = observe_run(run, held_out_data, job.tensors, _share(job.report, "calibrate"), None)
    halves = Halves(first.histograms, held_out.histograms, judges.held_out, job.data.unseen)
    merged = merge_observations(first, held_out)
    return fit(
        graph,
        merged,
        job.methods,
        judges.validation,
        exact=exact,
        halves=halves,
        operands=operands,
        on_progress=on_progress,
    )


def _equalise(job: _Job, judges: _Judges, plain: Fit) -> tuple[Fit, Rows, CorrectionOutcome | None]:
    """Step 3: the better fit, its factors by tensor, and the outcome."""
    switch = job.options.switch(job.options.equalise)
    if switch == "off":
        return plain, _NO_ROWS, None
    why_not = _why_not(job.source, job.data)
    if switch == "auto" and why_not:
        return plain, _NO_ROWS, CorrectionOutcome(EQUALISATION, "auto", False, reason=why_not)

    def refit(changed: ir.Model, rows: Rows) -> Fit:
        checkpoint = _checkpoint_of(job.options.resume, job.model_sha256, rows)
        observation = _observe(job, shared_runner(changed, job.tensors), checkpoint)
        return _fit(job, judges, changed, observation, plain.noise.exact)

    return try_equalisation(plain, job.data, refit, switch)


def _choose(job: _Job, fitted: Fit, learning: Sequence[Sample]) -> Fit:
    """Step 4, with method `auto`."""
    if job.options.method != AUTO:
        return fitted
    correct = partial(corrected_graph, samples=learning) if job.corrects else None
    shares = (_share(job.report, step) for step in ("compare methods", "choose ranges"))
    return search_ranges(fitted, correct, *shares)


def _correct(
    job: _Job,
    fitted: Fit,
    final: FinalFit,
    learning: Sequence[Sample],
    forbidden: Callable[[FinalFit], str],
) -> tuple[FinalFit, CorrectionOutcome | None]:
    """Step 6."""
    switch = job.options.switch(job.options.correct_biases)
    if job.corrects:
        return try_bias_correction(
            fitted,
            final,
            switch,
            samples=learning,
            forbidden=forbidden,
            on_progress=_share(job.report, "correct biases"),
        )
    if switch == "off":
        return final, None
    why_not = _why_not(job.source, job.data)
    return final, CorrectionOutcome(CORRECTION, "auto", False, reason=why_not)


def _spent(fitted: Fit, final: FinalFit) -> tuple[float, float]:
    return spent_shares(fitted, final.noise, final.ranges, final.keep_float)


def _judge(job: _Job, fitted: Fit, final: FinalFit) -> Judgement:
    """Step 7."""
    job.report("judge", 0.0)
    exact, actual = final.noise.compared(final.ranges, final.keep_float, fitted.judges)
    return judge(
        final.trial.parts, exact, actual, basis="seen" if fitted.halves is None else "held out"
    )


def _share(report: Report, step: str) -> Callable[[int, int], None]:
    """Progress as (done, total)."""
    return lambda done, total: report(step, done / max(total, 1))


def _refuse_unknown(nodes: frozenset[str], graph: ir.Model) -> None:
    known = {str(node.name) for node in graph.graph}
    for name in sorted(nodes - known):
        matches = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {matches[0]!r}?)" if matches else ""
        raise CalibrationError(
            f"there is no node {name!r} to keep in floating point{hint}: `tandem plan --nodes` "
            "lists the nodes"
        )


def _refuse_one_pass(source: Source, options: RangeOptions) -> None:
    """Refuse corrections that need a second pass over an iterator."""
    if isinstance(source, Iterator) and "on" in (options.equalise, options.correct_biases):
        raise CalibrationError(
            "equalisation and bias correction read the samples again, but an iterator gives them "
            "once: give a list, or an object that makes a new iterator each time"
        )


def _why_not(source: Source, data: Split) -> str:
    """Why a correction cannot be judged, "" if it can."""
    if isinstance(source, Iterator):
        return "it reads the samples again, but an iterator gives them once"
    if data.unseen:
        return ""
    if data.count >= MIN_SAMPLES:  # an iterable without a length: known after the first pass only
        return "samples without a known number leave none unseen to measure it on: give a list"
    return (
        f"{data.count} samples are too few to measure it on unseen ones: give at least "
        f"{MIN_SAMPLES}"
    )


def _checkpoint_of(resume: Path | None, model_sha256: str, rows: Rows) -> Checkpoint | None:
    """The checkpoint beside `resume` for an equalised model; one of other factors is deleted."""
    if resume is None:
        return None
    path = resume.with_name(f"{resume.name}.equalised")
    sha256 = hashlib.sha256(model_sha256.encode() + msgspec.json.encode(rows)).hexdigest()
    if path.exists() and read_state(path).model_sha256 != sha256:
        path.unlink()
    return Checkpoint(path, sha256)


def _budget_search(options: RangeOptions, judges: _Judges) -> BudgetSearch | None:
    """The request for the budget search; None without a budget."""
    if options.budget is None:
        return None
    return BudgetSearch(
        options.budget, judges.validation, options.keep_float, options.detector, options.labels
    )


def _budget_check(
    budget: BudgetResult | None, search: BudgetSearch | None
) -> Callable[[FinalFit], str]:
    """Return why a final fit no longer meets a budget that was met, "" if it does."""
    if budget is None or search is None:
        return lambda final: ""
    return partial(budget_violation, budget, search)


def _table(
    options: RangeOptions,
    fitted: Fit,
    *,
    samples: int,
    data_sha256: str,
    model_sha256: str,
    keep_float: frozenset[str],
    adjusted: Adjustments | UnsetType,
    preprocessing: Preprocessing | UnsetType,
) -> CalibrationTable:
    auto, methods = fitted.auto, dict[str, str]()
    if auto is not None:
        rest = dict.fromkeys(set(fitted.amax) - set(auto.amax), auto.start)
        methods = {**{choice.tensor: choice.method for choice in auto.choices}, **rest}
    return CalibrationTable(
        format=format_of(adjusted, preprocessing),
        method=options.method,
        samples=samples,
        data_sha256=data_sha256,
        model_sha256=model_sha256,
        tensors=dict(fitted.amax),
        methods=methods,
        keep_float=tuple(sorted(keep_float)),
        adjusted=adjusted,
        preprocessing=preprocessing,
    )


def _adjustments(factors: Rows, changes: Rows) -> Adjustments | UnsetType:
    if not factors and not changes:
        return UNSET
    return Adjustments(equalised=dict(factors), biases=dict(changes))


def dummy_table(graph: ir.Model, model_sha256: str) -> CalibrationTable:
    """A table of dummy ranges: INT8 with it has the right speed and wrong results."""
    return CalibrationTable(
        method="minmax",
        samples=0,
        data_sha256="0" * 64,
        model_sha256=model_sha256,
        tensors=with_operands(graph, dict.fromkeys(calibrated_tensors(graph), DUMMY_AMAX)),
        dummy=True,
    )
