"""Data -> calibration table: by one method, by trials of several, within an accuracy budget.

1 observe   every activation, in two halves     calibration.calibrate
2 fit       histograms -> amax, by each method  toolkit.quantize.trials.fit
3 equalise  rescaled weights, observed again    toolkit.quantize.corrections (optional)
4 keep      nodes that stay in floating point   toolkit.quantize.trials.keep (optional)
5 choose    `auto`: trials tensor by tensor     calibration.auto (optional)
6 round     weights for the sums they enter     toolkit.quantize.corrections (optional)
            nodes for an accuracy budget        toolkit.quantize.trials.budget (optional)
7 correct   biases, for the final ranges        toolkit.quantize.corrections (optional)
8 judge     what the outputs lose               toolkit.quantize.loss

INT8 error is measured at each output, on samples that are held out: they are judged with the ranges
that the methods give on the others (`toolkit.quantize.ranges.split`). If it decides anything, the
samples are in two halves, each with the ranges of the other. The first half chooses ranges and
nodes (`Fit.choosers`), the second judges. It also says no to ranges that lose more than the widest,
and decides whether corrections are kept, which are computed on the first half. The ranges that are
written come from all samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import onnx_ir as ir
from msgspec import UNSET, UnsetType

from calibration.auto import AutoResult
from calibration.budget import BudgetResult
from calibration.calibrate import Checkpoint
from calibration.channels import ChannelWatch, DeadChannels
from calibration.dataset import Sample, Skipped
from calibration.errors import CalibrationError
from calibration.observer import Histogram
from calibration.table import Adjustments, CalibrationTable, format_of
from calibration.threshold import method_named
from device.engine.preprocessing import Preprocessing
from toolkit.progress import Progress
from toolkit.quantize.corrections.corrections import CorrectionOutcome
from toolkit.quantize.loss.judge import Judgement, loss_text
from toolkit.quantize.observe import shared_runner
from toolkit.quantize.preprocess.decide import Decision
from toolkit.quantize.quantize import calibrated_tensors, with_operands
from toolkit.quantize.ranges.data import Source
from toolkit.quantize.ranges.first_layer import remark
from toolkit.quantize.ranges.options import AUTO, RangeOptions, with_model
from toolkit.quantize.ranges.steps import (
    NOT_DIVISIBLE,
    Chosen,
    ValidationSet,
    choose_all,
    divide,
    fit_ranges,
    judge_final,
    observe,
    opened,
    refuse_one_pass,
    refuse_resume,
    refuse_unknown,
)
from toolkit.quantize.trials.fit import FinalFit, Fit, Outputs
from toolkit.quantize.trials.keep import FloatNodes

__all__ = [
    "AUTO",
    "RangeOptions",
    "Ranges",
    "dummy_table",
    "measure_ranges",
    "with_model",
]

DUMMY_AMAX = 4.0
"""Range of a tensor that was not measured; trtexec uses 2 and 4."""


LARGEST_HALF = 65504.0
_SHOWN = 3  # nodes in the remark


def half_remark(graph: ir.Model, histograms: Mapping[str, Histogram]) -> str | None:
    """Return a sentence about the nodes whose results exceed FP16, None without any."""
    largest = {name: histogram.amax for name, histogram in histograms.items()}
    overflows = [
        (max(largest.get(str(out.name), 0.0) for out in node.outputs), node) for node in graph.graph
    ]
    beyond = [(amax, node) for amax, node in overflows if amax > LARGEST_HALF]
    if not beyond:
        return None
    shown = ", ".join(f"{node.name} ({node.op_type}, {amax:.3g})" for amax, node in beyond[:_SHOWN])
    more = f" and {len(beyond) - _SHOWN} more" if len(beyond) > _SHOWN else ""
    return (
        f"{len(beyond)} node{'' if len(beyond) == 1 else 's'} gave values above {LARGEST_HALF:g}, "
        f"the largest of FP16: {shown}{more}. Builds keep them in FP32 on a GPU; a DLA has none"
    )


@dataclass(frozen=True)
class Ranges:
    """A calibration table, with its graph, error and statistics.

    `fit`: the graph of the ranges, with weights changed by `corrections`, and its INT8 error.
    `judgement`: what the outputs lose, on the samples and FP32 outputs (by part) of `judges`.
    `candidates`: method -> tensor -> amax.
    `preprocessing`: image -> input; None: not known, as the samples are arrays. `remarks`: what
    about the inputs looks wrong. `float_nodes`: nodes that stay in floating point for the targets.
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
    float_nodes: FloatNodes | None = None

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
    graph: ir.Model, source: Source, model_sha256: str, options: RangeOptions, report: Progress
) -> Ranges:
    """Find the ranges of every activation of a graph that has gone through the passes.

    Raises TandemError: the data do not fit, hold NaN or infinities, or a method is unknown.
    """
    if options.method != AUTO:
        method_named(options.method)  # fails before hours of running
    refuse_unknown(options.keep_float, graph)
    refuse_one_pass(source, options)
    refuse_resume(options)
    job = opened(graph, source, model_sha256, options, report)
    checkpoint = None if options.resume is None else Checkpoint(options.resume, model_sha256)
    run = shared_runner(graph, job.tensors)
    watch = ChannelWatch(run)
    observation = observe(job, graph, run, checkpoint, watch=watch, states=options.states)
    judges = ValidationSet(job.data.validation, job.data.held_out)
    data_sha256 = job.data.sha256()
    plain = fit_ranges(job, judges, graph, observation, run)
    chosen = choose_all(job, judges, plain)
    fitted, final = chosen.fitted, chosen.final
    judgement = judge_final(job, fitted, final)
    histograms = observation.histograms
    return Ranges(
        table=_table(
            options,
            fitted,
            data_sha256=data_sha256,
            model_sha256=model_sha256,
            keep_float=final.keep_float,
            adjusted=_adjustments(chosen),
            preprocessing=UNSET if job.preprocessing is None else job.preprocessing.value,
            refused=tuple(map(loss_text, judgement.broken)) or UNSET,
        ),
        fit=final,
        requested=job.data.requested,
        samples=fitted.observation.samples,
        skipped=observation.skipped,
        dead=tuple(
            name for name, histogram in histograms.items() if histogram.elements and histogram.dead
        ),
        constant=tuple(
            name
            for name, histogram in histograms.items()
            if histogram.constant and not histogram.dead
        ),
        dead_channels=MappingProxyType(watch.dead),
        channel_samples=watch.samples,
        histograms=fitted.observation.histograms,
        candidates=MappingProxyType(dict(fitted.candidates)),
        judgement=judgement,
        judges=final.noise.selected(fitted.judges),
        preprocessing=job.preprocessing,
        remarks=_remarks(options, judges, graph, histograms),
        corrections=chosen.corrections,
        auto=fitted.auto,
        budget=chosen.budget,
        float_nodes=chosen.float_nodes,
    )


def measure_magnitudes(
    graph: ir.Model, source: Source, options: RangeOptions, report: Progress
) -> dict[str, float]:
    """Return the largest magnitude of every activation over the data, for builds in FP16.

    Raises TandemError: the data do not fit, or hold NaN or infinities.
    """
    refuse_one_pass(source, options)
    job = opened(graph, source, "0" * 64, options, report)
    histograms = observe(job, graph, shared_runner(graph, job.tensors), None).histograms
    return {name: histogram.amax for name, histogram in histograms.items()}


def observe_shard(
    graph: ir.Model,
    source: Source,
    model_sha256: str,
    options: RangeOptions,
    report: Progress,
    *,
    index: int,
    count: int,
) -> bytes:
    """Observe shard `index` of `count` (from 0), as `RangeOptions.states` takes it.

    Raises TandemError: the data do not fit or cannot be cut.
    """
    refuse_unknown(options.keep_float, graph)
    job = opened(graph, source, model_sha256, options, report)
    run = shared_runner(graph, job.tensors)
    sharded = divide(job, graph, run)
    if sharded is None:
        raise CalibrationError(NOT_DIVISIBLE)
    start, stop = sharded.ranges(count)[index]
    if start == stop:
        raise CalibrationError(
            f"{count} shards are more than the {len(sharded.data) - start} samples: take fewer"
        )
    report("calibrate", 0.0)
    return sharded.observe(run, start, stop)


def _remarks(
    options: RangeOptions,
    judges: ValidationSet,
    graph: ir.Model,
    histograms: Mapping[str, Histogram],
) -> tuple[str, ...]:
    """What about the inputs and the values looks wrong."""
    empty = sum(not histogram.elements for histogram in histograms.values())
    sentences = (
        remark(options.first_layer, judges.validation),
        half_remark(graph, histograms),
        f"{empty} tensors were empty in every sample and stay in floating point: data decide their "
        "size, as that of the detections of a kind that no sample has"
        if empty
        else None,
    )
    return tuple(sentence for sentence in sentences if sentence is not None)


def _table(
    options: RangeOptions,
    fitted: Fit,
    *,
    data_sha256: str,
    model_sha256: str,
    keep_float: frozenset[str],
    adjusted: Adjustments | UnsetType,
    preprocessing: Preprocessing | UnsetType,
    refused: tuple[str, ...] | UnsetType,
) -> CalibrationTable:
    auto, methods = fitted.auto, dict[str, str]()
    if auto is not None:
        rest = dict.fromkeys(set(fitted.amax) - set(auto.amax), auto.start)
        methods = {**{choice.tensor: choice.method for choice in auto.choices}, **rest}
    return CalibrationTable(
        format=format_of(adjusted, preprocessing, refused),
        method=options.method,
        samples=fitted.observation.samples,
        data_sha256=data_sha256,
        model_sha256=model_sha256,
        tensors=dict(fitted.amax),
        methods=methods,
        keep_float=tuple(sorted(keep_float)),
        adjusted=adjusted,
        preprocessing=preprocessing,
        refused=refused,
    )


def _adjustments(chosen: Chosen) -> Adjustments | UnsetType:
    changes, rounded = chosen.final.changes, dict(chosen.rounded) or UNSET
    if not chosen.factors and not changes and not rounded:
        return UNSET
    return Adjustments(equalised=dict(chosen.factors), biases=dict(changes), rounded=rounded)


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
