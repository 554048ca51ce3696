"""The steps of a calibration, each on what the steps before it made (see `measure`)."""

import difflib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from calibration.budget import BudgetResult
from calibration.calibrate import Checkpoint, Observation
from calibration.channels import ChannelWatch
from calibration.dataset import Dataset, Sample, memory_dataset
from calibration.errors import CalibrationError
from calibration.runs import Run
from calibration.state import read_state
from toolkit.progress import Progress
from toolkit.quantize.corrections.corrections import (
    CORRECTION,
    CORRECTION_SAMPLES,
    EQUALISATION,
    CorrectionOutcome,
    Rows,
    Switch,
    corrected_graph,
    try_bias_correction,
    try_equalisation,
    try_rounding,
    with_rounded,
)
from toolkit.quantize.gpu_operands import operands_on_gpu
from toolkit.quantize.loss.judge import Judgement, judge
from toolkit.quantize.observe import observe_run, shared_runner
from toolkit.quantize.preprocess.decide import Decision
from toolkit.quantize.quantize import calibrated_tensors, with_operands
from toolkit.quantize.ranges.data import Source, input_specs, open_data, preprocessing_of
from toolkit.quantize.ranges.options import AUTO, RangeOptions
from toolkit.quantize.ranges.shards import (
    ShardedPass,
    merged,
    observe_head,
    shard_count,
    sharded_pass,
    shards_of_files,
    shards_of_workers,
)
from toolkit.quantize.ranges.split import MAX_VALIDATION, MIN_SAMPLES, Split
from toolkit.quantize.trials.budget import BudgetSearch, budget_violation, find_budget
from toolkit.quantize.trials.effort import affordable_samples
from toolkit.quantize.trials.fit import (
    AUTO_METHODS,
    WIDEST,
    FinalFit,
    Fit,
    Halves,
    Outputs,
    final_fit,
    fit,
    loses_no_more,
    merge_observations,
    search_ranges,
    spent_shares,
    trial_ranges,
    widest_fit,
    with_float,
)
from toolkit.quantize.trials.keep import FloatNodes, keep_best, needs_nodes

WORSE = "minmax without it loses less at the outputs"
FURTHER = "the outputs would be further from their targets"
NOT_DIVISIBLE = (
    "the data cannot be observed in shards: they are fewer than those that validate, no folder or "
    "file, or an unreadable picture moves the others into other batches; calibrate in one process"
)
_NO_ROWS: Rows = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Job:
    """A calibration request; `tensors` of `graph` get ranges from `data`."""

    graph: ir.Model
    tensors: Sequence[str]
    source: Source
    preprocessing: Decision | None
    data: Split
    options: RangeOptions
    model_sha256: str
    report: Progress

    @property
    def methods(self) -> Sequence[str]:
        """The threshold methods to observe for; several if `auto` chooses."""
        return AUTO_METHODS if self.options.method == AUTO else (self.options.method,)

    @property
    def chooses(self) -> bool:
        """True if `auto` may leave out everything that loses more than the widest ranges."""
        options = self.options
        switches = (options.equalise, options.round_weights, options.correct_biases)
        return options.method == AUTO and "on" not in switches

    @property
    def corrects(self) -> bool:
        """True if bias correction is tried."""
        return self._tries(self.options.correct_biases)

    @property
    def rounds(self) -> bool:
        """True if weights may be rounded for their sums."""
        return self._tries(self.options.round_weights)

    def _tries(self, correction: Switch | None) -> bool:
        switch = self.options.switch(correction)
        return switch == "on" or (switch == "auto" and not _why_not(self.source, self.data))


@dataclass(frozen=True, slots=True)
class ValidationSet:
    """Validation samples; the first pass does not observe those at the indices `held_out`."""

    validation: Sequence[Sample]
    held_out: NDArray[np.intp]


def opened(
    graph: ir.Model, source: Source, model_sha256: str, options: RangeOptions, report: Progress
) -> Job:
    """Open the samples, some of them held out; in two halves if they decide anything."""
    switches = (options.switch(options.equalise), options.switch(options.correct_biases))
    preprocessing = _preprocessing(graph, source, options)
    data = Split(
        samples_of(graph, source, options),
        options.search or switches != ("off", "off"),
        affordable_samples(graph, MAX_VALIDATION, MIN_SAMPLES // 2),
    )
    tensors = calibrated_tensors(graph)
    return Job(graph, tensors, source, preprocessing, data, options, model_sha256, report)


def samples_of(graph: ir.Model, source: Source, options: RangeOptions) -> Dataset:
    """Open the samples, at most as many as the options say.

    Raises TandemError: the data do not fit the inputs of the graph.
    """
    preprocessing = _preprocessing(graph, source, options)
    config = None if preprocessing is None else preprocessing.config
    return open_data(source, input_specs(graph), config, options.samples)


def _preprocessing(graph: ir.Model, source: Source, options: RangeOptions) -> Decision | None:
    specs = input_specs(graph)
    return preprocessing_of(source, specs, options.preprocess, options.suggested)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What steps 3 to 7 chose; `factors`: of the equalisation, by tensor; `rounded`: by node."""

    fitted: Fit
    final: FinalFit
    factors: Rows
    rounded: Mapping[str, str]
    corrections: tuple[CorrectionOutcome, ...]
    budget: BudgetResult | None
    float_nodes: FloatNodes | None


def choose_all(job: Job, judges: ValidationSet, plain: Fit) -> Chosen:
    """Steps 3 to 7: weights, nodes in floating point and ranges.

    The nodes come before ranges: beside one that ruins an output, nothing else can be measured.
    Those of the plain graph are searched only if they are asked for.
    """
    options = job.options
    plain_with_nodes = cache(lambda: _with_nodes(job, plain))
    fitted, factors, equalisation = _equalise(job, judges, plain, plain_with_nodes)
    fitted, for_targets = _with_nodes(job, fitted) if factors else plain_with_nodes()
    learning = job.data.first(CORRECTION_SAMPLES) if job.corrects or job.rounds else ()
    fitted = _choose(job, fitted, learning)
    fitted, rounded, rounding = _round(job, fitted, learning)
    search, budget, nodes = _budget_search(options), None, fitted.noise.always_float
    if search is not None:
        budget = find_budget(fitted, search, _share(job.report, "spend the budget"))
        nodes |= budget.keep_float
    rounded = {node: steps for node, steps in rounded.items() if node not in nodes}
    fitted = with_rounded(fitted, rounded)
    final = final_fit(fitted, nodes)
    if budget is not None and search is not None:
        forbidden = partial(budget_violation, budget, search, fitted)
    else:
        forbidden = partial(_further, fitted, final, for_targets)
    final, correction = _correct(job, fitted, final, learning, forbidden)
    steps = (equalisation, rounding, correction)
    corrections = tuple(report for report in steps if report is not None)
    if job.chooses and budget is None and fitted.trial.tensors:
        ranges = trial_ranges(plain.trial, with_operands(plain.graph, plain.candidates[WIDEST]))
        spent = spent_shares(fitted, final.noise, final.ranges)
        if not loses_no_more(spent, spent_shares(plain, plain.noise.with_float(nodes), ranges)):
            fitted, for_targets = plain_with_nodes()
            fitted = widest_fit(fitted)
            final = final_fit(fitted, fitted.noise.always_float)
            factors, rounded = _NO_ROWS, {}
            corrections = tuple(
                replace(report, applied=False, reason=WORSE) for report in corrections
            )
    return Chosen(fitted, final, factors, rounded, corrections, budget, for_targets)


def _with_nodes(job: Job, fitted: Fit) -> tuple[Fit, FloatNodes | None]:
    """Step 4, for the widest ranges, where the best single method needs nodes."""
    options, for_targets = job.options, None
    all_int8 = with_float(fitted, frozenset())
    if options.keeps and needs_nodes(all_int8, options.keep_float):
        amax = with_operands(fitted.graph, fitted.candidates[job.methods[0]])
        on_progress = _share(job.report, "look for nodes to keep in float")
        widest = replace(all_int8, amax=amax)
        for_targets = keep_best(widest, options.keep_float, options.most_float, on_progress)
    nodes = frozenset() if for_targets is None else for_targets.nodes
    return with_float(fitted, nodes | options.keep_float), for_targets


def _further(fitted: Fit, before: FinalFit, for_targets: FloatNodes | None, after: FinalFit) -> str:
    """Return why corrected biases may not be used beside `kept` nodes, "" if they may."""
    if for_targets is None:
        return ""
    share_before, share_after = (
        fit.noise.judged(fit.ranges, fit.keep_float, fitted.choosers).target_spent
        for fit in (before, after)
    )
    return FURTHER if share_after > max(share_before, 1.0) else ""


def observe(
    job: Job,
    graph: ir.Model,
    run: Run,
    checkpoint: Checkpoint | None,
    *,
    watch: ChannelWatch | None = None,
    states: Sequence[Path] = (),
) -> Observation:
    """Step 1, with `run` of `graph`; `watch` sees its results. `states`: of shards, as files."""
    if (states or job.options.workers is not None) and checkpoint is None:
        observation = _in_shards(job, graph, run, watch, states)
        if observation is not None:
            return observation
        if states:
            raise CalibrationError(NOT_DIVISIBLE)
    on_progress = _share(job.report, "calibrate")
    return observe_run(watch or run, job.data, job.tensors, on_progress, checkpoint)


def divide(job: Job, graph: ir.Model, run: Run) -> ShardedPass | None:
    """Return the pass over the data in shards, None if they cannot be cut."""
    head = job.data.read_head()
    if head is None or not isinstance(job.source, str | Path):
        return None
    config = None if job.preprocessing is None else job.preprocessing.config
    return sharded_pass(
        graph, job.tensors, head, run,
        path=Path(job.source), preprocess=config, samples=job.options.samples,
    )  # fmt: skip


def _in_shards(
    job: Job, graph: ir.Model, run: Run, watch: ChannelWatch | None, states: Sequence[Path]
) -> Observation | None:
    sharded = divide(job, graph, run)
    if sharded is None:
        return None
    on_progress, channel_watch = _share(job.report, "calibrate"), ChannelWatch(run)
    head = observe_head(channel_watch, sharded, on_progress)
    if states:
        shards = iter(shards_of_files(sharded, states))
    else:
        assert job.options.workers is not None
        count = shard_count(graph, len(sharded.data) - sharded.head.stop)
        shards = shards_of_workers(sharded, count, job.options.workers, on_progress)
    observation = merged(head, sharded, channel_watch, shards)
    if watch is not None and observation is not None:
        watch.merge(channel_watch.alive, channel_watch.samples)
    return observation


def fit_ranges(
    job: Job,
    judges: ValidationSet,
    graph: ir.Model,
    first: Observation,
    run: Run,
    *,
    exact: Sequence[Outputs] | None = None,
) -> Fit:
    """Step 2; held-out samples are observed here, by the runner of the first pass."""
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


def _equalise(
    job: Job,
    judges: ValidationSet,
    plain: Fit,
    with_nodes: Callable[[], tuple[Fit, FloatNodes | None]],
) -> tuple[Fit, Rows, CorrectionOutcome | None]:
    """Step 3: the better fit, its factors by tensor, and the outcome."""
    switch = job.options.switch(job.options.equalise)
    if switch == "off":
        return plain, _NO_ROWS, None
    why_not = _why_not(job.source, job.data)
    if switch == "auto" and why_not:
        return plain, _NO_ROWS, CorrectionOutcome(EQUALISATION, "auto", False, reason=why_not)

    def refit(changed: ir.Model, rows: Rows) -> Fit:
        checkpoint = _checkpoint_of(job.options.resume, job.model_sha256, rows)
        changed_job = replace(job, tensors=calibrated_tensors(changed))
        run = shared_runner(changed, changed_job.tensors)
        observation = observe(changed_job, changed, run, checkpoint)
        return fit_ranges(changed_job, judges, changed, observation, run, exact=plain.noise.exact)

    def float_nodes() -> frozenset[str]:
        return with_nodes()[0].noise.always_float

    return try_equalisation(plain, job.data, refit, switch, float_nodes)


def _choose(job: Job, fitted: Fit, learning: Sequence[Sample]) -> Fit:
    """Step 5, with method `auto`."""
    if job.options.method != AUTO:
        return fitted
    correct = partial(corrected_graph, samples=learning) if job.corrects else None
    shares = (_share(job.report, step) for step in ("compare methods", "choose ranges"))
    return search_ranges(fitted, correct, *shares)


def _correct(
    job: Job,
    fitted: Fit,
    final: FinalFit,
    learning: Sequence[Sample],
    forbidden: Callable[[FinalFit], str],
) -> tuple[FinalFit, CorrectionOutcome | None]:
    """Step 7."""
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


def _round(
    job: Job, fitted: Fit, learning: Sequence[Sample]
) -> tuple[Fit, Mapping[str, str], CorrectionOutcome | None]:
    """Step 6."""
    if not job.rounds or not fitted.trial.tensors:
        return fitted, {}, None
    switch, keep_float = job.options.switch(job.options.round_weights), fitted.noise.always_float
    ranges = trial_ranges(fitted.trial, fitted.amax)
    if switch == "auto" and fitted.noise.judged(ranges, keep_float).target_spent <= 1.0:
        return fitted, {}, None
    job.report("round weights", 0.0)
    return try_rounding(fitted, switch, samples=learning, keep_float=keep_float)


def judge_final(job: Job, fitted: Fit, final: FinalFit) -> Judgement:
    """Step 8."""
    job.report("judge", 0.0)
    exact, actual = final.noise.compared(final.ranges, final.keep_float, fitted.judges)
    return judge(
        final.trial.parts, exact, actual, basis="seen" if fitted.halves is None else "held out"
    )


def _share(report: Progress, step: str) -> Callable[[int, int], None]:
    """Progress as (done, total)."""
    return lambda done, total: report(step, done / max(total, 1))


def refuse_unknown(nodes: frozenset[str], graph: ir.Model) -> None:
    """Raise CalibrationError for a name of `nodes` that no node of `graph` has."""
    known = {str(node.name) for node in graph.graph}
    for name in sorted(nodes - known):
        matches = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {matches[0]!r}?)" if matches else ""
        raise CalibrationError(
            f"there is no node {name!r} to keep in floating point{hint}: `tandem plan --nodes` "
            "lists the nodes"
        )


def refuse_one_pass(source: Source, options: RangeOptions) -> None:
    """Refuse corrections that need a second pass over an iterator."""
    if isinstance(source, Iterator) and "on" in (options.equalise, options.correct_biases):
        raise CalibrationError(
            "equalisation and bias correction read the samples again, but an iterator gives them "
            "once: give a list, or an object that makes a new iterator each time"
        )


def refuse_resume(options: RangeOptions) -> None:
    """Refuse a checkpoint of one process beside shards."""
    if options.resume is not None and (options.workers is not None or options.states):
        raise CalibrationError(
            f"{options.resume} is the checkpoint of one process: leave it out, as shards that "
            "workers have finished are in the cache"
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


def _budget_search(options: RangeOptions) -> BudgetSearch | None:
    """The request for the budget search; None without a budget."""
    if options.budget is None:
        return None
    return BudgetSearch(options.budget, options.keep_float, options.detector, options.labels)
