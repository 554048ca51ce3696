"""What an engine says of its making: model, ranges, versions, and what the build has measured."""

import math
from collections.abc import Iterator, Mapping
from importlib.metadata import version

import msgspec
import onnx_ir as ir
from msgspec import UNSET, UnsetType

from calibration.budget import BudgetResult
from calibration.table import CalibrationTable, fingerprint
from device.engine.arithmetic import BFLOAT16_STEP, FLOAT8_STEP
from device.engine.manifest import DUMMY, CalibrationInfo, Manifest, Measurement, Provenance
from toolkit.engine.frontend_result import Frontend
from toolkit.engine.segments import BuiltSegments
from toolkit.engine.target import Target
from toolkit.errors import printable
from toolkit.gpu.codegen.cuda_source import find_compiler
from toolkit.quantize.corrections.corrections import CORRECTION, EQUALISATION, ROUNDING
from toolkit.quantize.loss.judge import Judgement, samples_text
from toolkit.quantize.loss.metrics import (
    AGREEMENT,
    DETECTION_DROP,
    LINES,
    MASK_IOU,
    RANKING,
    SCORE_DROP,
    SCORE_RISE,
    SQNR,
    OutputLoss,
)
from toolkit.quantize.qdq.nodes import is_dequantize, is_quantize

LICENCE_KEYS = frozenset({"license", "licence"})  # of a model's metadata
CLASS_KEYS = ("names", "character")  # what Ultralytics' and PaddleOCR's exports call them
MAX_NAMES_BYTES = 64 * 1024  # 1000 classes of ImageNet have 30 KiB
TASK_SCORE, TASK_SCORE_DROP = "task_score", "task_score_drop"
SCORED_BY = "map50"  # the metric of a budget that is a score of the task
# Figure of merit -> its name in a release, by which gates of rollouts ask for it.
NAMES: Mapping[str, str] = {
    SQNR.name: "sqnr_db",
    SCORE_DROP.name: "score_drop",
    SCORE_RISE.name: "score_rise",
    DETECTION_DROP.name: "detection_drop",
    RANKING.name: "ranking",
    AGREEMENT.name: "agreement",
    LINES.name: "lines",
    MASK_IOU.name: "mask_iou",
}


def provenance_of(front: Frontend, built: BuiltSegments) -> Provenance:
    """Return what is known before the engine has run."""
    info, table = None, front.table
    if table is not None:
        measured = front.ranges
        file = front.options.table if measured is None else measured.table
        info = CalibrationInfo(
            method=DUMMY if table.dummy else table.method,
            samples=table.samples,
            data_sha256=table.data_sha256,
            table_sha256=UNSET if file is None else fingerprint(file),
        )
    return Provenance(
        model=front.imported.name,
        model_sha256=front.imported.sha256,
        precision=built.plan.precision,
        passes=(
            *(step.name for step in front.passes if step.changes),
            *_adjusting(table),
            *((BFLOAT16_STEP,) if front.bfloat16 else ()),
            *((FLOAT8_STEP,) if _has_float8(front.prepared.model) else ()),
        ),
        versions=_versions(
            front.target,
            kernels=bool(built.gpu.segments),
            plugins=bool(front.options.plugins),
        ),
        calibration=info,
        licence=_licence(front.imported.model.metadata_props),
        metadata=_class_names(front.imported.model.metadata_props),
    )


def _has_float8(model: ir.Model) -> bool:
    """Whether activations are rounded to FP8 for products, by the build or the model's own Q/DQ."""
    return any(
        is_quantize(node)
        and node.outputs[0].dtype == ir.DataType.FLOAT8E4M3FN
        and any(is_dequantize(use.node) for use in node.outputs[0].uses())
        for node in model.graph
    )


def _licence(metadata: Mapping[str, str]) -> str | UnsetType:
    """Return the licence that a model's metadata name, as it is written there."""
    texts = (text for key, text in metadata.items() if key.lower() in LICENCE_KEYS)
    return next((text for text in map(printable, texts) if text), UNSET)


def _class_names(metadata: Mapping[str, str]) -> dict[str, str] | UnsetType:
    """Return the metadata that name the classes, for labels of a pipeline of this engine."""
    names = {key: metadata[key] for key in CLASS_KEYS if key in metadata}
    size = sum(len(text.encode(errors="replace")) for text in names.values())
    return names if names and size <= MAX_NAMES_BYTES else UNSET


def with_measured(manifest: Manifest, judgement: Judgement, front: Frontend) -> Manifest:
    """Return the manifest with what the build has measured; the same if that is nothing."""
    measured = loss_measurements(judgement)
    budget, ranges = front.options.ranges.budget, front.ranges
    if budget is not None and ranges is not None and ranges.budget is not None:
        measured += tuple(score_measurements(budget.metric, ranges.budget))
    if not measured:
        return manifest
    provenance = msgspec.structs.replace(manifest.provenance, measured=measured)
    return msgspec.structs.replace(manifest, provenance=provenance)


def _adjusting(table: CalibrationTable | None) -> tuple[str, ...]:
    """The steps that a table takes beside the passes, in their order."""
    if table is None or not table.adjusted:
        return ()
    adjusted = table.adjusted
    rows = (
        (EQUALISATION, adjusted.equalised),
        (ROUNDING, adjusted.rounded),
        (CORRECTION, adjusted.biases),
    )
    return tuple(name for name, changed in rows if changed)


def _versions(target: Target, *, kernels: bool, plugins: bool) -> dict[str, str]:
    names = ("onnx", "onnx-ir", "onnxscript", "tandem-edge", *(("triton",) if kernels else ()))
    versions = {name: version(name) for name in names}
    compiler = find_compiler() if kernels and plugins else None
    if compiler is not None:
        versions["cuda"] = compiler.version
    if target.jetpack is not None:
        versions["jetpack"] = target.jetpack.version
        versions["tensorrt"] = target.jetpack.tensorrt
    return dict(sorted(versions.items()))


def loss_measurements(judgement: Judgement) -> tuple[Measurement, ...]:
    """Return the worst value of each figure over all outputs; none that is not finite."""
    worst: dict[str, OutputLoss] = {}
    for loss in judgement.losses:
        known = worst.get(loss.metric.name)
        if math.isfinite(loss.value) and (known is None or _is_worse(loss, known)):
            worst[loss.metric.name] = loss
    basis = samples_text(judgement)
    return tuple(
        Measurement(
            name=NAMES[name],
            value=_rounded(loss.value),
            how=f"{name} of output {printable(loss.part)}, INT8 against FP32, {basis}",
        )
        for name, loss in worst.items()
    )


def score_measurements(metric: str, budget: BudgetResult) -> Iterator[Measurement]:
    """Yield the task's score, where the search for an accuracy budget has measured one."""
    if metric != SCORED_BY or not (math.isfinite(budget.value) and budget.met):
        return
    how = "mAP50, 0 to 1, on the scenes that ship with Tandem, in a trial of the INT8 ranges"
    yield Measurement(name=TASK_SCORE, value=_rounded(budget.value / 100.0), how=how)
    if math.isfinite(budget.float_value):
        drop = _rounded((budget.float_value - budget.value) / 100.0)
        yield Measurement(name=TASK_SCORE_DROP, value=drop, how=f"FP32 less INT8: {how}")


def _is_worse(loss: OutputLoss, so_far: OutputLoss) -> bool:
    if loss.metric.larger_is_better:
        return loss.value < so_far.value
    return loss.value > so_far.value


def _rounded(value: float) -> float:
    """Return six digits: more differ from one machine to the next."""
    return float(f"{value:.6g}")
