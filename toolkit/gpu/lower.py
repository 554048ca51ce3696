"""A segment for the GPU, step by step: ONNX -> cubins, launches, weights and workspace.

1 ask       nodes without kernel -> their definitions     toolkit.gpu.support
  read      ONNX -> operations, shapes, constants         toolkit.gpu.ir.network
            Q/DQ -> tensors that lie as INT8              toolkit.gpu.passes.quantized
            patterns -> fewer, larger operations          toolkit.gpu.passes.composites
2 group     operations -> one kernel each                 toolkit.gpu.passes.fusion
3 alias     Concat operands -> slices of its result       toolkit.gpu.emit.concat
4 emit      groups -> launches, tensors -> views          toolkit.gpu.operations
5 fit       allocations -> offsets in one workspace       toolkit.gpu.schedule.workspace
6 compile   kernels -> cubins                             toolkit.gpu.codegen.compile_kernels
            measured times -> the fastest tactics         toolkit.gpu.schedule.tactics
7 write     program -> manifest of the engine             toolkit.gpu.compile_segment

Steps 1 to 5 are here, pure, without Triton; `compile_segment.py` does the others. A segment that
kernels cannot compute as a whole raises NotCoveredError.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal

import onnx_ir as ir

from device.engine.manifest import Precision
from toolkit.gpu.emit import concat, elementwise
from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.launches import WEIGHTS
from toolkit.gpu.emit.lowering_differences import find_difference, point_text
from toolkit.gpu.emit.plugins import plugin_emitters
from toolkit.gpu.errors import NotCoveredError, not_covered
from toolkit.gpu.ir.dtypes import OPERAND_TYPES
from toolkit.gpu.ir.launch import KernelLaunch, TunableOp
from toolkit.gpu.ir.network import Network, read_network
from toolkit.gpu.ir.patterns import apply_rules
from toolkit.gpu.ir.view import View, row_major
from toolkit.gpu.operations import EPILOGUES, OPERATIONS, Emitter
from toolkit.gpu.passes.composites import CHOSEN_REGION_RULES, COMPOSITE_RULES
from toolkit.gpu.passes.concat_split import push_through_concat
from toolkit.gpu.passes.first_convolutions import PATCH_EMBEDDING_RULES, SPACE_TO_DEPTH_RULES
from toolkit.gpu.passes.float8 import with_float8_products
from toolkit.gpu.passes.fusion import Group, group_operations
from toolkit.gpu.passes.gemm import GEMM_RULES, RESIDUAL_RULES
from toolkit.gpu.passes.layout import EARLY_LAYOUT_RULES, LAYOUT_RULES
from toolkit.gpu.passes.layout_chains import merge_layout_chains
from toolkit.gpu.passes.quantized import read_quantized
from toolkit.gpu.reasons import reason
from toolkit.gpu.schedule.workspace import WorkspacePlan, fit_workspace
from toolkit.gpu.shapes.inference import Trace
from toolkit.gpu.shapes.sizes import upper_bound
from toolkit.gpu.support import ask_support
from toolkit.gpu.target import GpuTarget
from toolkit.graph.dtypes import BFLOAT16, FIRST_SM_WITH_FLOAT8, FLOAT8
from toolkit.plugins import Plugin

KernelPrecision = Precision | Literal["bf16"]

# Tensors without INT8 scale are stored in this type.
_FLOAT_TYPES: dict[KernelPrecision, str] = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": BFLOAT16,
    "int8": "float16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProgram(WorkspacePlan):
    """A segment before compiling: operations in order, memory, packed weights.

    `sizes`: bytes of each allocation; `outputs` and `inputs`: views of the segment's tensors in the
    order of the segment. `dynamic`: sizes may be formulas, and what is planned in bytes is so for
    the largest ones.
    """

    sizes: Mapping[str, int]
    inputs: Mapping[str, View]
    outputs: Mapping[str, View]
    weights: bytes = b""
    dynamic: bool = False

    @property
    def launches(self) -> tuple[KernelLaunch, ...]:
        """Return the launches of the first tactics: the choice without timings."""
        return tuple(launch for op in self.ops for launch in op.tactics[0])


def fit_program(
    ops: Sequence[TunableOp],
    sizes: Mapping[str, int],
    inputs: Mapping[str, View],
    outputs: Mapping[str, View],
    *,
    weights: bytes = b"",
    dynamic: bool = False,
    limit: int | None = None,
    apart: bool = False,
) -> KernelProgram:
    """Return the program of these operations, its allocations placed as in `fit_workspace`."""
    read, written = ([view.base for view in views.values()] for views in (inputs, outputs))
    plan = fit_workspace(ops, sizes, read, written, limit, apart=apart)
    planned = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return KernelProgram(
        **planned, sizes=sizes, inputs=inputs, outputs=outputs, weights=weights, dynamic=dynamic
    )


def lower_segment(
    segment: ir.Model,
    *,
    gpu: GpuTarget,
    precision: KernelPrecision,
    plugins: Sequence[Plugin] = (),
    traces: Sequence[Trace] = (),
    exact: frozenset[str] = frozenset(),
    wide: frozenset[str] = frozenset(),
) -> KernelProgram:
    """Lower a segment to kernel launches and a workspace, without a compiler.

    `traces`: points of the dynamic dimensions; tiles are chosen for the first. `exact`: tensors
    that kernels exchange in their own type, whatever the precision; `wide`: those that they also
    multiply so, as 16 bits do not hold them (`toolkit.gpu.beyond_half`). Raises
    NotCoveredError: a node has no kernel, or launches differ between points; PluginError: a plugin
    fails.
    """
    plugged = [plugin.title for plugin in plugins]
    supported = ask_support(segment, plugged, traces[0] if traces else None)
    if supported.refused:
        raise not_covered(supported.refused) from not_covered(supported.last)
    lower = partial(
        _lower,
        supported.model,
        gpu=gpu,
        precision=precision,
        plugins=plugins,
        exact=exact,
        wide=wide,
    )
    return _lower_at_every_point(lower, traces)


def _lower_at_every_point(
    lower: Callable[[Trace | None], KernelProgram], traces: Sequence[Trace]
) -> KernelProgram:
    """Lower at every point and return the program; raises NotCoveredError if they differ."""
    first = lower(traces[0] if traces else None)
    for trace in traces[1:]:
        program = lower(trace)
        if program == first:
            continue
        nodes, what = find_difference(first.ops, program.ops)
        points = f"{point_text(traces[0].space)} and at {point_text(trace.space)}"
        where = ", ".join(map(repr, nodes)) or "the segment"
        why = f"{where} {what} at {points}; fix the sizes with --shape"
        raise NotCoveredError(why, dict.fromkeys(nodes, why))
    return first


def _lower(
    segment: ir.Model,
    trace: Trace | None,
    *,
    gpu: GpuTarget,
    precision: KernelPrecision,
    plugins: Sequence[Plugin],
    exact: frozenset[str],
    wide: frozenset[str],
) -> KernelProgram:
    lowerings = {kind: row.lower for kind, row in OPERATIONS.items() if row.lower}
    emitters = {**lowerings, **plugin_emitters(plugins)}
    network = _rewritten(read_network(segment, emitters, trace), gpu)
    _check_borders(network)
    _check_float8(network, gpu)
    groups = group_operations(network, EPILOGUES)
    exact, wide = (_through_transposes(network, names) for names in (exact, wide))
    ctx = LoweringContext(network, gpu, _FLOAT_TYPES[precision], exact, wide)
    inputs = {name: _allocate_boundary(ctx, name, name) for name in network.inputs}
    ctx.views.update(inputs)
    concat.plan_concat_slices(ctx, groups)
    _emit(ctx, groups, emitters)
    outputs: dict[str, View] = {}
    for name in network.outputs:
        outputs[name] = _output(ctx, name, {view.base for view in outputs.values()})
    sizes = {base: upper_bound(size) for base, size in ctx.allocations.items()}
    return fit_program(
        tuple(ctx.ops),
        sizes,
        inputs,
        outputs,
        weights=bytes(ctx.weights.data),
        dynamic=trace is not None,
        apart=gpu.shares_memory,
    )


def _through_transposes(network: Network, names: frozenset[str]) -> frozenset[str]:
    """Return the names, and the tensors that rules have put before or behind a Transpose."""
    moves = ({op.inputs[0], op.outputs[0]} for op in network.operations if op.kind == "Transpose")
    return names.union(*(move for move in moves if names & move))


def _rewritten(network: Network, gpu: GpuTarget) -> Network:
    """Run all rewrites, quantized operators first."""
    gemm_rules = (*GEMM_RULES, *RESIDUAL_RULES) if gpu.has_matrix_units else GEMM_RULES
    network = read_quantized(apply_rules(network, EARLY_LAYOUT_RULES))
    network = merge_layout_chains(
        apply_rules(network, (*COMPOSITE_RULES, *LAYOUT_RULES, *PATCH_EMBEDDING_RULES, *gemm_rules))
    )
    network = apply_rules(network, CHOSEN_REGION_RULES)
    network = push_through_concat(network, EPILOGUES)
    return with_float8_products(apply_rules(network, SPACE_TO_DEPTH_RULES))


def _check_borders(network: Network) -> None:
    """Raise NotCoveredError: kernels do not exchange the type of an input or output."""
    reasons: dict[str, str] = {}
    for name in (*network.inputs, *network.outputs):
        dtype = network.dtypes.get(name, "constant")
        if dtype in OPERAND_TYPES:
            continue
        why = f"tensor {name!r} has the type {dtype}; kernels read and write "
        why += ", ".join(OPERAND_TYPES)
        touching = [op for op in network.operations if name in (*op.inputs, *op.outputs)]
        if not touching:
            raise NotCoveredError(why)
        reasons |= {op.name: why for op in touching}
    if reasons:
        raise not_covered(reasons)


def _check_float8(network: Network, gpu: GpuTarget) -> None:
    """Raise NotCoveredError: tensors lie as FP8, which the GPU does not compute."""
    if gpu.sm >= FIRST_SM_WITH_FLOAT8:
        return
    refusal = reason("gpu.float8:sm", FLOAT8, FIRST_SM_WITH_FLOAT8, gpu.sm)
    reasons = {
        op.name: f"node {op.name!r} {refusal}"
        for op in network.operations
        if FLOAT8 in map(network.dtypes.get, op.outputs)
    }
    if reasons:
        raise not_covered(reasons)


def _emit(ctx: LoweringContext, groups: Sequence[Group], emitters: Mapping[str, Emitter]) -> None:
    """Emit the launches of all groups; raises NotCoveredError for all nodes that have no kernel."""
    reasons: dict[str, str] = {}
    for group in groups:
        emit = elementwise.emit_elementwise if group.root is None else emitters[group.root.kind]
        try:
            emit(ctx, group)
        except NotCoveredError as error:
            reasons |= dict.fromkeys(group.nodes, str(error))
            results = (group.result, *(group.root.outputs if group.root else ()))
            for name in results:  # so that later groups are checked too
                if name not in ctx.views:
                    ctx.output_view(name)
    if reasons:
        raise not_covered(reasons)


def _allocate_boundary(ctx: LoweringContext, base: str, name: str) -> View:
    """Allocate an input or output of the segment: row-major, in its ONNX type."""
    shape = ctx.network.shapes[name]
    return ctx.allocate(base, ctx.network.dtypes[name], shape, row_major(shape))


def _output(ctx: LoweringContext, name: str, taken: set[str]) -> View:
    """Return the view of an output; copies it where it has no row-major allocation of its own."""
    view = ctx.read(name)
    is_whole = view.offset == 0 and ctx.allocations.get(view.base) == view.nbytes
    is_own = view.base not in (*ctx.network.inputs, *taken, WEIGHTS)
    if is_whole and is_own and view.is_row_major() and view.dtype == ctx.network.dtypes[name]:
        return view
    target = _allocate_boundary(ctx, f"{name} (output)", name)
    ctx.add_elementwise(target, [view])
    return target
