"""What each precision of a model costs and loses on one board: the rows of `tandem explore`.

Plans, ranges and losses are those of a build. No engine is written.
"""

import math
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from toolkit.engine.frontend import run_frontend
from toolkit.engine.frontend_result import Frontend
from toolkit.engine.options import BuildOptions, RequestedPrecision
from toolkit.engine.precision_gain import frame_us
from toolkit.engine.support import ask_gpu
from toolkit.engine.target import choose_target
from toolkit.errors import BuildError, about
from toolkit.graph.block_weights import BlockTensor
from toolkit.graph.dtypes import FIRST_SM_WITH_BFLOAT16, FIRST_SM_WITH_FLOAT8
from toolkit.graph.node_view import views
from toolkit.importers.onnx import ModelSource, open_model, source_path
from toolkit.partition.planning.plan import plan_together
from toolkit.partition.planning.portable import KernelSupport
from toolkit.plugins import Plugin
from toolkit.progress import Progress
from toolkit.quantize.block_floats.formats import FIRST_SM as FIRST_SM_OF_BLOCKS
from toolkit.quantize.block_floats.formats import BlockFormat
from toolkit.quantize.block_floats.graph import simulated
from toolkit.quantize.float8.products import float8_products
from toolkit.quantize.loss.judge import Judgement, judge
from toolkit.quantize.loss.metrics import SQNR
from toolkit.quantize.loss.parts import split_outputs
from toolkit.quantize.loss.rounded import HalfModel
from toolkit.quantize.qdq.export import BLOCK_FORMS
from toolkit.quantize.qdq.nodes import is_dequantize, is_quantize
from toolkit.quantize.quantize import int8_nodes
from toolkit.quantize.ranges.data import Source
from toolkit.quantize.ranges.measure import (
    RangeOptions,
    Ranges,
    measure_magnitudes,
    with_model,
)
from toolkit.quantize.weights import constant_of


@dataclass(frozen=True, slots=True)
class Form:
    """A way to build a model; `flags`: of `tandem build`; `ranges`: of INT8.

    `int4`: numbers of a weight in INT4 that share a scale. `simulated`: a format without kernels
    here, of which TensorRT is given a model; `flags` are then those of `tandem calibrate`.
    """

    name: str
    precision: RequestedPrecision
    flags: tuple[str, ...]
    ranges: RangeOptions | None = None
    int4: Literal[128] | None = None
    simulated: BlockFormat | None = None

    @property
    def reads_data(self) -> bool:
        """Whether data decide how the model is quantized."""
        quantized = self.int4 is not None or self.simulated is not None
        return quantized or self.precision in {"int8", "fp8"}

    @property
    def can_fail(self) -> bool:
        """Whether a model may have nothing for the form, or lose too much in all of it."""
        quantized = self.int4 is not None or self.simulated is not None
        return quantized or self.precision == "fp8"

    @property
    def first_sm(self) -> int:
        """The oldest GPU that computes the form; 0: it needs none."""
        if self.int4 is not None:
            return FIRST_SM_WITH_INT4
        if self.simulated is not None:
            return 0
        return _FIRST_SM.get(self.precision, 0)


FORMS = (
    Form("FP32", "fp32", ("--precision", "fp32")),
    Form("FP16", "fp16", ("--precision", "fp16")),
    Form("BF16", "bf16", ("--precision", "bf16")),
    Form("FP8", "fp8", ("--precision", "fp8")),
    Form("INT4 weights", "fp16", ("--int4-weights", "128"), int4=128),
    Form("INT8, min-max", "int8", ("--method", "minmax"), RangeOptions("minmax")),
    Form("INT8, corrected", "int8", ("--keep", "none"), RangeOptions(keep="none")),
    Form("INT8, default", "int8", (), RangeOptions()),
    Form("INT8, 50 % in float", "int8", ("--keep", "50%"), RangeOptions(most_float=0.5)),
    Form("INT8, AdaRound", "int8", ("--round-weights", "on"), RangeOptions(round_weights="on")),
    *(
        Form(f"{row.name} (simulated)", "fp16", ("--qdq-for", name), simulated=row)
        for name, row in BLOCK_FORMS.items()
    ),
)
"""Corrected: ranges, equalisation and bias correction, each by measured loss."""
FIRST_SM_WITH_INT4 = 80  # whose kernels read weights of 4 bits (`toolkit.gpu`)
_WEIGHTS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT8E4M3FN})
_FIRST_SM: Mapping[str, int] = {
    "fp16": 1,
    "bf16": FIRST_SM_WITH_BFLOAT16,
    "fp8": FIRST_SM_WITH_FLOAT8,
}


@dataclass(frozen=True, slots=True)
class ExploreRequest:
    """A model, its data and a board. `ranges`: samples and preprocessing, of every form."""

    model: ModelSource
    data: Source
    profile: str
    jetpack: str | None = None
    shapes: Mapping[str, tuple[int, ...]] | None = None
    plugins: tuple[Plugin, ...] = ()
    ranges: RangeOptions = field(default_factory=RangeOptions)


@dataclass(frozen=True, slots=True)
class Point:
    """A form with its predicted time and energy of a frame, and the bytes of its weights.

    Both are None of a simulated form. `on_dla`: share of the nodes. `float_share`: of the
    multiplications that could be INT8. `loss`: None of FP32, which loses nothing. `best`: no other
    point is as good in all of time, energy, size and loss, and better in one.
    """

    form: Form
    frame_us: float | None
    energy_mj: float | None
    weight_bytes: int
    on_dla: float
    float_share: float
    loss: Judgement | None
    best: bool = False

    @property
    def spent(self) -> float:
        """Share of its limit that the largest loss spends; a build refuses INT8 above 1."""
        return 0.0 if self.loss is None else self.loss.spent

    @property
    def sqnr_db(self) -> float:
        """SQNR of the worst output in dB."""
        losses = () if self.loss is None else self.loss.losses
        values = [row.value for row in losses if row.metric is SQNR]
        return min(
            (-math.inf if math.isnan(value) else value for value in values), default=math.inf
        )

    def beats(self, point: "Point") -> bool:
        """True if no figure is worse, and one is better, of two with times."""
        ours, theirs = self._figures(), point._figures()
        if not ours or not theirs:
            return False
        return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))

    def _figures(self) -> tuple[float, ...]:
        """All figures, less is better; () without a time."""
        if self.frame_us is None or self.energy_mj is None:
            return ()
        return (self.frame_us, self.energy_mj, self.weight_bytes, self.spent, -self.sqnr_db)


@dataclass(frozen=True, slots=True)
class Explored:
    """The points of a model on a board, and what to know of them; `not_built`: forms, and why."""

    model: str
    profile: str
    points: tuple[Point, ...]
    not_built: Mapping[str, str]
    notes: tuple[str, ...]


def explore(request: ExploreRequest, report: Progress) -> Explored:
    """Calibrate and plan every form.

    Raises TandemError: the model, the data or the profile cannot be used.
    """
    name = source_path(request.model).name
    profile = choose_target(request.profile, request.jetpack).profile
    sm = 0 if profile.gpu is None else profile.gpu.sm
    forms = [form for form in FORMS if sm >= form.first_sm]
    not_built = {
        form.name: f"GPUs from SM {form.first_sm} on compute it"
        for form in FORMS
        if form.first_sm > max(1, sm)
    }
    points: dict[str, Point] = {}
    fronts: dict[str, Frontend] = {}
    with about(name), tempfile.TemporaryDirectory() as folder:
        state = Path(folder, "observed.state")  # so that the data are observed once
        # INT8 observes the data, and what is simulated is the graph of a form before it.
        order = sorted(forms, key=lambda form: (bool(form.simulated), form.precision != "int8"))
        for form in order:
            try:
                if form.simulated is not None:
                    points[form.name] = _simulated(request, form, form.simulated, fronts, report)
                    continue
                fronts[form.name] = front = _front(request, form, state, report)
            except BuildError as err:
                if not form.can_fail:
                    raise
                not_built[form.name] = str(err)  # such as a model without products
                continue
            points[form.name] = _point(form, front, _loss(form, fronts))
    rows = tuple(points[form.name] for form in forms if form.name in points)
    rows = tuple(replace(row, best=_is_best(row, rows)) for row in rows)
    return Explored(name, profile.name, rows, not_built, _notes(rows, fronts))


def _is_best(row: Point, rows: Sequence[Point]) -> bool:
    return row.frame_us is not None and not any(one.beats(row) for one in rows)


def _front(request: ExploreRequest, form: Form, state: Path, report: Progress) -> Frontend:
    ranges = form.ranges and replace(
        form.ranges,
        samples=request.ranges.samples,
        preprocess=request.ranges.preprocess,
        resume=state,
    )
    options = BuildOptions(
        precision=form.precision,
        jetpack=request.jetpack,
        data=request.data if form.reads_data else None,
        ranges=ranges or request.ranges,
        accept_loss=not form.can_fail,  # those that can keep their limits by products in FP16
        int4_weights=form.int4,
        shapes=request.shapes,
        plugins=request.plugins,
    )
    target = choose_target(request.profile, request.jetpack)
    opened = open_model(request.model, plugins=request.plugins, report=report)

    def named(step: str, share: float) -> None:
        report(f"{form.name}: {step}", share)

    return run_frontend(opened, target, options, named)


def _loss(form: Form, fronts: Mapping[str, Frontend]) -> Judgement | None:
    ranges = fronts[form.name].ranges
    if ranges is not None:
        return ranges.judgement
    if form.precision == "fp32":
        return None
    front, measured = fronts[form.name], _measured(fronts)
    wide = frozenset(front.wide)
    if front.float8 is None:
        half = ir.DataType.BFLOAT16 if front.bfloat16 else ir.DataType.FLOAT16
        graph = front.graph if form.int4 is None else front.prepared.model
        return _half_loss(graph, _ranges(measured), wide, half)
    model = front.float8.model
    return _half_loss(model, _ranges(measured), wide | _of_float8(model))


def _measured(fronts: Mapping[str, Frontend]) -> Frontend:
    """A form in INT8."""
    return next(front for front in fronts.values() if front.ranges is not None)


def _ranges(front: Frontend) -> Ranges:
    assert front.ranges is not None
    return front.ranges


def _of_float8(model: ir.Model) -> frozenset[str]:
    """Return the scales of Q/DQ and the numbers that FP8 stands for: kernels round neither."""
    scaled = [node for node in model.graph if is_quantize(node) or is_dequantize(node)]
    scales = {str(node.inputs[1].name) for node in scaled if node.inputs[1] is not None}
    return frozenset(scales | {str(node.outputs[0].name) for node in scaled})


def _half_loss(
    graph: ir.Model,
    ranges: Ranges,
    wide: frozenset[str],
    half: ir.DataType = ir.DataType.FLOAT16,
) -> Judgement:
    """What 16 bits lose with the tensors `wide` in FP32, on the samples that judge INT8."""
    run, parts = HalfModel(graph, wide, half), ranges.fit.trial.parts
    actual = [split_outputs(parts, run(sample)) for sample, _ in ranges.judges]
    return judge(parts, [exact for _, exact in ranges.judges], actual, basis="held out")


def _simulated(
    request: ExploreRequest,
    form: Form,
    block_format: BlockFormat,
    fronts: Mapping[str, Frontend],
    report: Progress,
) -> Point:
    """What a format loses that no kernel here computes. Raises BuildError: no product has it."""
    front = fronts.get("FP16", fronts["FP32"])
    options = with_model(request.ranges, front.imported)
    amax = {}
    if block_format.ranged:
        amax = measure_magnitudes(front.graph, request.data, options, report)
    model = simulated(front.graph, block_format, amax)
    wide = frozenset(front.wide) | model.exact
    macs = {row.name: row.macs or 0 for row in views(front.graph.graph)}
    could = [macs[str(node.name)] for node, _ in int8_nodes(front.graph)]
    return Point(
        form=form,
        frame_us=None,
        energy_mj=None,
        weight_bytes=model.weight_bytes + _weight_bytes(model.model, front, 2, model.exact),
        on_dla=0.0,
        float_share=1.0 - sum(macs[name] for name in model.products) / max(1, sum(could)),
        loss=_half_loss(model.model, _ranges(_measured(fronts)), wide),
    )


def _point(form: Form, front: Frontend, loss: Judgement | None) -> Point:
    profile, model = front.target.profile, front.prepared.model
    gpu = profile.gpu is not None
    kernels = ask_gpu(model, (), front.options.plugins) if gpu else KernelSupport()
    trials = {front.imported.name: front.prepared.trial}
    plan = plan_together((front.to_plan(kernels),), profile, front.plan, trials).plans[0]
    on_dla = sum(row.processor.startswith("dla") for row in plan.placements)
    float_bytes = 2 if gpu and form.precision != "fp32" else 4
    return Point(
        form=form,
        frame_us=frame_us(plan),
        energy_mj=plan.figures[0].energy_mj,
        weight_bytes=_weight_bytes(model, front, float_bytes),
        on_dla=on_dla / max(1, len(plan.placements)),
        float_share=_float_share(front),
        loss=loss,
    )


def _float_share(front: Frontend) -> float:
    """Return the share of the multiplications of products that is in floating point, or FP16."""
    if front.float8 is not None:
        graph = front.graph
        macs = {row.name: row.macs or 0 for row in views(graph.graph)}
        could = [macs[str(node.name)] for node, _ in int8_nodes(graph)]
        products = {str(node.name) for node in float8_products(graph)} - front.float8.floats.keys()
        return 1.0 - sum(macs[name] for name in products) / max(1, sum(could))
    if front.ranges is None:
        return 1.0
    float_nodes = front.ranges.float_nodes
    return 0.0 if float_nodes is None else float_nodes.float_share


def _weight_bytes(
    model: ir.Model, front: Frontend, float_bytes: int, without: Collection[str] = ()
) -> int:
    """Bytes of the constants; a weight of an INT8 node has one for each number."""
    int8 = set[str]()
    if front.table is not None:
        for node, row in int8_nodes(model, front.keep_float):
            weight = constant_of(node, row.weight)
            if weight is not None and weight.ndim > 1 and row.weight is not None:
                value = node.inputs[row.weight]
                assert value is not None
                int8.add(str(value.name))
    total = 0
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or value.dtype not in _WEIGHTS or name in without:
            continue
        if isinstance(tensor, BlockTensor):
            total += tensor.packed_bytes
            continue
        wide = name not in int8 and value.dtype == ir.DataType.FLOAT
        total += tensor.size * (float_bytes if wide else 1)
    return total


def _notes(points: Sequence[Point], fronts: Mapping[str, Frontend]) -> tuple[str, ...]:
    notes = []
    half = next((row for row in points if row.form.name == "FP16"), None)
    slower = [
        row.form.name
        for row in points
        if half is not None and row.form.precision == "int8"
        if (row.frame_us or 0.0) >= (half.frame_us or 0.0)
    ]
    if any(row.form.simulated for row in points):
        notes.append(
            f"simulated: GPUs from SM {FIRST_SM_OF_BLOCKS} on compute it, in TensorRT; there are "
            "no kernels here, so no time is predicted"
        )
    if slower:
        notes.append(f"FP16 is predicted to be as fast as {' and '.join(slower)}, or faster")
    refused = [row.form.name for row in points if row.form.precision == "int8" and row.spent > 1.0]
    if refused:
        notes.append(
            f"a build refuses {' and '.join(refused)}: a loss is beyond its limit; "
            "`tandem build --accept-loss` takes it"
        )
    if half is not None and (half.spent > 1.0 or half.sqnr_db == -math.inf):
        notes.append("FP16 fails: a loss is beyond its limit, or an output is not finite")
    if half is not None:
        notes += [row for row in _ranges(_measured(fronts)).remarks if "the largest of FP16" in row]
    if any(front.target.profile.dla is not None for front in fronts.values()):
        notes.append("losses are those before tensors share scales on the DLA; a build judges both")
    return tuple(notes)
