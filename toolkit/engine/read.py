"""Steps 1 and 2 of the build: the model, folded and fused, and the precision of its engine."""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import onnx_ir as ir

from device.choices import list_choices
from device.engine.manifest import Precision
from device.profile import Profile
from toolkit.engine.frontend_result import Frontend
from toolkit.engine.options import BuildOptions
from toolkit.engine.target import Target
from toolkit.errors import BuildError, ImportModelError
from toolkit.graph.check import check_nodes
from toolkit.graph.dtypes import FIRST_SM_WITH_BFLOAT16, FIRST_SM_WITH_FLOAT8
from toolkit.graph.memory_limit import check_device_memory, check_host_memory
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import ImportedModel, ModelSource, OpenModel, open_model, sized
from toolkit.partition.prepared import Prepared
from toolkit.plugins.functions import give_shapes
from toolkit.progress import Progress, silent
from toolkit.quantize.float8.products import float8_products
from toolkit.quantize.qdq.blocks import import_blocks
from toolkit.quantize.qdq.importer import PlainModel, check_narrow_floats, import_qdq
from toolkit.quantize.quantize import QUANTIZED_OPS, calibrated_tensors
from toolkit.quantize.ranges.table_file import has_qdq

KEPT_QDQ = "the Q/DQ of the model stay as they are, off the DLA, and do not make the engine INT8"
FLOAT8_STAYS = "FP8 (E4M3) by the model's Q/DQ; products that have kernels are computed in FP8"
_BLOCKS = "read as they are by FP16 kernels from sm_80 on, and as floating point by all else"


def read_model(
    model: ModelSource | OpenModel,
    target: Target,
    options: BuildOptions,
    report: Progress = silent,
    *,
    batch: int = 1,
    assume_ranges: bool = False,
) -> Frontend:
    """Import a model, run the passes, and choose the precision; `batch`: of a dynamic one.

    `assume_ranges`: INT8 needs no ranges. Raises TandemError: the model cannot be used, or not at
    the precision that is asked for.
    """
    _refuse(options, target.profile)
    report("import", 0.0)
    if not isinstance(model, OpenModel):
        model = open_model(model, plugins=options.plugins, report=report)
    imported = sized(model, shapes=options.shapes, dims=options.dims, batch=batch)
    imported = _with_blocks(imported, options)
    plain, qdq_notes = _plain(imported, options, target.profile)
    imported = replace(imported, notes=imported.notes + qdq_notes)
    graph, passes = run_passes(imported.model if plain is None else plain.model)
    give_shapes(graph, options.plugins)
    check_nodes(graph)
    check_host_memory(graph.graph)
    check_device_memory(graph.graph, target.profile)
    imported, bfloat16 = _stores_bfloat16(imported, options, target.profile)
    precision = _precision(
        options, target, graph, imported, plain, assume=assume_ranges, bfloat16=bfloat16
    )
    plan = replace(options.plan, precision=precision, bfloat16=bfloat16, tensorrt=target.tensorrt)
    prepared = Prepared(graph, {})
    return Frontend(options, target, imported, graph, passes, plain, plan, report, prepared)


def _with_blocks(imported: ImportedModel, options: BuildOptions) -> ImportedModel:
    """Return the model with its weights of 4 bits in blocks as constants, and a note on them."""
    blocks = import_blocks(imported.model, keep_qdq=_wants_int8(options))
    notes = blocks.notes
    if blocks.weights:
        notes = (f"weights of 4 bits in blocks: {blocks.weights}, {_BLOCKS}", *notes)
    if blocks.floats:
        notes = (f"weights in NVFP4 or MXFP8: {blocks.floats}, which become floating point", *notes)
    return replace(imported, model=blocks.model, notes=imported.notes + notes)


def _plain(
    imported: ImportedModel, options: BuildOptions, profile: Profile
) -> tuple[PlainModel | None, tuple[str, ...]]:
    """Return a Q/DQ model without its Q/DQ where it becomes INT8; else None; second, notes.

    INT8 is the default of a Q/DQ model. Where its Q/DQ are not such as INT8 engines have, they
    stay in the graph as they are.
    """
    if not has_qdq(imported.model):
        return None, ()
    if options.precision == "bf16":
        raise BuildError(
            f"{imported.name} holds Q/DQ, beside which engines have FP16, not BF16: give the plain "
            "model, such as `tandem ranges ... --plain` writes, or build with --precision fp16."
        )
    float8 = check_narrow_floats(imported.model, _no_float8(options, profile))
    if options.precision == "fp8":
        _refuse_quantized(options, imported, float8)
    floating = options.precision or (options.int4_weights and "fp16")
    if float8 or (floating and not _wants_int8(options)):
        tensors = "1 tensor stays" if float8 == 1 else f"{float8} tensors stay"
        stay = f"{tensors} {FLOAT8_STAYS}" if float8 else ""
        return None, (stay or f"the Q/DQ of the model stay as they are, beside {floating}",)
    if _wants_int8(options):
        return import_qdq(imported.model, any_weight_scale=True, any_zero_point=True), ()
    try:
        plain = import_qdq(imported.model, any_weight_scale=True)
    except ImportModelError as err:
        return None, (f"{KEPT_QDQ}: {err}",)
    if not plain.amax:
        return replace(plain, notes=()), (
            "the model quantizes weights alone: they become floating point",
        )
    ranges = f"{len(plain.amax)} ranges"
    return plain, (
        f"INT8 with the {ranges} of the model's own Q/DQ (build with --precision for another)",
    )


def _no_float8(options: BuildOptions, profile: Profile) -> str | None:
    """Return why Q/DQ of FP8 cannot stay in a model; None if they can."""
    if _wants_int8(options):
        return "of which no INT8 is made: build with --precision fp16 alone"
    older = _older_gpu(profile, FIRST_SM_WITH_FLOAT8)
    return older and f"which GPUs from SM {FIRST_SM_WITH_FLOAT8} on compute; {older}"


def _older_gpu(profile: Profile, first_sm: int) -> str | None:
    """Return what a profile has where it has no GPU from an SM on; None: it has one."""
    if profile.gpu is None:
        return f"{profile.name} has none"
    return f"that of {profile.name} has SM {profile.gpu.sm}" if profile.gpu.sm < first_sm else None


def _no_bfloat16(profile: Profile) -> str | None:
    """Return why kernels of a profile cannot have BF16; None if they can."""
    older = _older_gpu(profile, FIRST_SM_WITH_BFLOAT16)
    return older and f"GPUs from SM {FIRST_SM_WITH_BFLOAT16} on compute it; {older}"


# When options are refused, alone or by the profile; what is true is the value in the text.
_REFUSALS: tuple[tuple[Callable[[BuildOptions, Profile], object], str], ...] = (
    (lambda given, _: given.data is not None and given.table is not None,
     "Both data and a calibration table are given, and each sets the INT8 ranges: give one of "
     "them."),
    (lambda given, _: given.int4_weights and given.precision not in (None, "fp16")
     and given.precision,
     "INT4 weights are those of FP16 engines, not of {}: leave out one of `tandem build "
     "--int4-weights` and --precision."),
    (lambda given, _: given.int4_weights and given.data is None,
     "INT4 weights are chosen by what the model computes on samples: give some with `tandem build "
     "--data`."),
    (lambda given, _: given.int4_weights and given.save_table is not None,
     "INT4 weights measure no ranges that a table could hold: do not save one, or leave out "
     "`tandem build --int4-weights`."),
    (lambda given, profile: given.precision == "fp8" and _no_float8(given, profile),
     "FP8 (E4M3) is a type {}; build with --precision fp16 or int8."),
    (lambda given, _: given.precision == "fp8" and given.dummy_ranges,
     "FP8 has no dummy ranges: give data with `tandem build --data` or a table with --table, or "
     "time INT8."),
    (lambda given, profile: given.precision == "bf16" and _no_bfloat16(profile),
     "BF16 is not supported: {}. Build with --precision fp32, or with fp16, which keeps in FP32 "
     "what FP16 does not hold."),
    (lambda given, _: given.precision == "bf16" and given.gpu_backend != "cuda",
     "BF16 is a type of kernels, of which TensorRT gets none: build with `tandem build "
     "--gpu-backend cuda`."),
    (lambda given, _: given.precision == "bf16"
     and (given.table is not None or given.save_table is not None or given.dummy_ranges),
     "BF16 has no ranges to take, save or make up: give samples alone, with `tandem build --data`, "
     "by which it is judged."),
)  # fmt: skip


def _refuse(options: BuildOptions, profile: Profile) -> None:
    for condition, text in _REFUSALS:
        if value := condition(options, profile):
            raise BuildError(text.format(value))


def _stores_bfloat16(
    imported: ImportedModel, options: BuildOptions, profile: Profile
) -> tuple[ImportedModel, bool]:
    """Return whether kernels store BF16, and the model with a note where it was in BF16."""
    chosen = options.precision is not None or _has_ranges(options) or has_qdq(imported.model)
    if not imported.bfloat16 or chosen or options.int4_weights is not None:
        return imported, options.precision == "bf16"
    why = "the form for TensorRT has none" if options.gpu_backend != "cuda" else ""
    why = why or _no_bfloat16(profile) or ""
    note = f"its engine is FP32, not BF16: {why}" if why else "its kernels store BF16"
    return replace(imported, notes=(*imported.notes, note)), not why


def _refuse_quantized(options: BuildOptions, imported: ImportedModel, float8: int) -> None:
    """Refuse to quantize again, and Q/DQ of INT8 in the place of FP8."""
    if not float8:
        raise BuildError(
            f"{imported.name} holds Q/DQ of integers, of which no FP8 is made: give the plain "
            "model, such as `tandem ranges ... --plain` writes, or leave out `tandem build "
            "--precision`."
        )
    if _has_ranges(options):
        raise BuildError(
            f"{imported.name} holds Q/DQ of FP8, with scales of its own: leave out `tandem build "
            "--data` and --table."
        )


def _wants_int8(options: BuildOptions) -> bool:
    """Whether INT8 is asked for, by its name or by ranges."""
    if options.int4_weights is not None:
        return False
    return options.precision in ("int8", "best") or (
        options.precision is None and _has_ranges(options)
    )


def _has_ranges(options: BuildOptions) -> bool:
    return options.data is not None or options.table is not None or options.dummy_ranges


def _precision(
    options: BuildOptions,
    target: Target,
    graph: ir.Model,
    imported: ImportedModel,
    plain: PlainModel | None,
    *,
    assume: bool,
    bfloat16: bool,
) -> Precision:
    name = imported.name
    has_ranges = _has_ranges(options) or (plain is not None and bool(plain.amax))
    default: Precision = "int8" if has_ranges else "fp16" if target.profile.gpu else "fp32"
    if options.int4_weights is not None:
        default = "fp16"
    elif imported.bfloat16 and not has_ranges and not has_qdq(imported.model):
        default = "fp32"  # FP16 may not hold its numbers
    requested = options.precision
    choices = (*get_args(Precision), "best", "bf16", "fp8")
    if requested is not None and requested not in choices:
        raise BuildError(
            f"there is no precision {requested!r}: use one of {list_choices(requested, choices)}"
        )
    if bfloat16 or requested == "bf16":
        return "fp16"
    if requested == "fp8":
        if not _has_ranges(options) and not has_qdq(graph):
            raise BuildError(
                "FP8 needs activation ranges: give calibration data with `tandem build --data`, a "
                "table with --table, or build with --precision fp16."
            )
        if not has_qdq(graph) and not float8_products(graph):
            _refuse_half(graph, name, "FP8")
        return "fp16"
    precision = default if requested is None or requested == "best" else requested
    if precision != "int8" or (assume and not has_ranges):
        return precision
    if not has_ranges:
        raise BuildError(
            "INT8 needs activation ranges: give calibration data with `tandem build --data`, a "
            "table with --table, build with --precision fp16, or time only with --dummy-ranges."
        )
    _refuse_int8(graph, name)
    return precision


def _refuse_int8(graph: ir.Model, name: str) -> None:
    """Refuse what would be called INT8 and be none."""
    _refuse_half(graph, name, "INT8")
    if not calibrated_tensors(graph):
        raise BuildError(
            f"{name} holds no float32 tensor that INT8 could stand for; "
            "build it with --precision fp32."
        )


def _refuse_half(graph: ir.Model, name: str, precision: str) -> None:
    """Refuse a model that is in half precision itself."""
    for node in graph.graph:
        data = node.inputs[0] if node.op_type in QUANTIZED_OPS and node.inputs else None
        if data is not None and data.dtype == ir.DataType.FLOAT16:
            raise BuildError(
                f"{name} computes in {data.dtype.name} (node {node.name!r}, {node.op_type}), but "
                f"{precision} is made from float32; export it in float32 (ModelOpt: "
                "direct_io_types=False), or build with --precision fp16."
            )
