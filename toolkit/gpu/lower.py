"""A segment for the GPU, step by step: ONNX -> cubins, launches, weights and workspace.

1 ask       nodes without kernel -> their definitions     toolkit.gpu.support
  read      ONNX -> operations, shapes, constants         toolkit.gpu.ir.network
            Q/DQ -> tensors that lie as INT8              toolkit.gpu.passes.quantized
            patterns -> fewer, larger operations          toolkit.gpu.passes.composites
2 group     operations -> one kernel each                 toolkit.gpu.passes.fusion
3 place     concatenations in place                       toolkit.gpu.emit.concat
4 emit      groups -> work, tensors -> views              toolkit.gpu.emit.table
5 fit       allocations -> offsets in one workspace       toolkit.gpu.schedule.workspace
6 compile   kernels -> cubins                             toolkit.gpu.codegen.compile
            measured times -> the fastest tactics         toolkit.gpu.schedule.tactics
7 write     work -> launches of the engine                toolkit.gpu.compile

Steps 1 to 5 are here, pure, without Triton; `compile.py` does the others. A segment that kernels
cannot compute as a whole raises NotCoveredError.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from device.engine.manifest import Precision
from toolkit.gpu.emit import concat, elementwise
from toolkit.gpu.emit.agreement import Difference, find_difference, point_text
from toolkit.gpu.emit.context import WEIGHTS, LoweringContext
from toolkit.gpu.emit.generation import NO_GENERATION, Generation
from toolkit.gpu.emit.plugins import plugin_emitters
from toolkit.gpu.emit.table import EMITTERS, Emitter
from toolkit.gpu.emit.tiled_gemm import TILED
from toolkit.gpu.errors import NotCoveredError, not_covered
from toolkit.gpu.generations import parts
from toolkit.gpu.ir.dtypes import ELEMENT_TYPES
from toolkit.gpu.ir.expressions import is_elementwise
from toolkit.gpu.ir.launch import KernelLaunch, TunableOp
from toolkit.gpu.ir.network import Network, read_network
from toolkit.gpu.ir.patterns import apply_rules
from toolkit.gpu.ir.view import View, row_major
from toolkit.gpu.passes.composites import COMPOSITE_RULES
from toolkit.gpu.passes.concat_split import push_through_concat
from toolkit.gpu.passes.fusion import EPILOGUES, Group, group_operations
from toolkit.gpu.passes.gemm import GEMM_RULES
from toolkit.gpu.passes.layout import EARLY_LAYOUT_RULES, LAYOUT_RULES
from toolkit.gpu.passes.layout_chains import merge_layout_chains
from toolkit.gpu.passes.patch_embedding import PATCH_EMBEDDING_RULES
from toolkit.gpu.passes.quantized import read_quantized
from toolkit.gpu.passes.space_to_depth import SPACE_TO_DEPTH_RULES
from toolkit.gpu.schedule.workspace import fit_workspace
from toolkit.gpu.shapes.inference import Trace
from toolkit.gpu.shapes.sizes import most
from toolkit.gpu.support import ask_support
from toolkit.gpu.target import GpuTarget
from toolkit.plugins import Plugin

# What lies on no INT8 grid is stored in this type.
_STORED: dict[Precision, str] = {"fp32": "float32", "fp16": "float16", "int8": "float16"}


@dataclass(frozen=True, slots=True)
class KernelProgram:
    """A segment before compiling: work in order, where everything lies, packed weights.

    `sizes`: bytes of each allocation; `offsets`: bytes from the start of the workspace to it;
    `outputs` and `inputs`: views of the segment's tensors in the order of the segment. `dynamic`:
    sizes may be formulas, and what is planned in bytes is so for the largest ones.
    """

    work: tuple[TunableOp, ...]
    sizes: Mapping[str, int]
    offsets: Mapping[str, int]
    workspace_bytes: int
    largest_live_bytes: int
    weights: bytes
    inputs: Mapping[str, View]
    outputs: Mapping[str, View]
    dynamic: bool = False

    @property
    def calls(self) -> tuple[KernelLaunch, ...]:
        """What runs where nothing was measured: the first tactic of all work."""
        return tuple(call for work in self.work for call in work.tactics[0])


def lower_segment(
    segment: ir.Model,
    *,
    gpu: GpuTarget,
    precision: Precision,
    plugins: Sequence[Plugin] = (),
    traces: Sequence[Trace] = (),
) -> KernelProgram:
    """Do all that needs no compiler; raises NotCoveredError, and PluginError of plugins' nodes.

    `traces`: points of the dynamic dimensions, the first of which blocks are chosen for. The draft
    holds for all of them; one that would not is not covered.
    """
    plugged = [plugin.title for plugin in plugins]
    supported = ask_support(segment, plugged, traces[0] if traces else None)
    if supported.refused:
        raise not_covered(supported.refused) from not_covered(supported.last)
    draft = partial(_drafted, supported.model, gpu=gpu, precision=precision, plugins=plugins)
    return _drafted_everywhere(draft, traces)


def _drafted_everywhere(
    draft: Callable[[Trace | None], KernelProgram], traces: Sequence[Trace]
) -> KernelProgram:
    """Draft at every point, and return the first draft if all are the same."""
    first = draft(traces[0] if traces else None)
    for trace in traces[1:]:
        redrafted = draft(trace)
        if redrafted == first:
            continue
        difference = find_difference(first.work, redrafted.work) or Difference(
            (), "has other constants"
        )
        nodes = ", ".join(map(repr, difference.nodes)) or "the segment"
        why = (
            f"{nodes} {difference.what} at {point_text(traces[0].space)} and at "
            f"{point_text(trace.space)}; fix the sizes with --shape"
        )
        raise NotCoveredError(why, dict.fromkeys(difference.nodes, why))
    return first


def _drafted(
    segment: ir.Model,
    trace: Trace | None,
    *,
    gpu: GpuTarget,
    precision: Precision,
    plugins: Sequence[Plugin],
) -> KernelProgram:
    generation = _generation(gpu)
    emitters = {**EMITTERS, **generation.emitters, **plugin_emitters(plugins)}
    network = _rewritten(read_network(segment, emitters, trace), generation, precision)
    _check(network, emitters)
    groups = group_operations(network, {**EPILOGUES, **generation.epilogues})
    draft = LoweringContext(
        network,
        gpu,
        _STORED[precision],
        schedules=(*generation.preferred, TILED, *generation.alternatives),
        mma_warps=generation.mma_warps,
    )
    inputs = {name: _border(draft, name, name) for name in network.inputs}
    draft.views.update(inputs)
    concat.plan_concat_slices(draft, groups)
    _emit(draft, groups, emitters)
    outputs: dict[str, View] = {}
    for name in network.outputs:
        outputs[name] = _output(draft, name, {view.base for view in outputs.values()})
    sizes = {base: most(size) for base, size in draft.allocations.items()}
    fitted = fit_workspace(
        generation.fuse(draft, draft.ops),
        sizes,
        [view.base for view in inputs.values()],
        [view.base for view in outputs.values()],
    )
    return KernelProgram(
        work=fitted.work,
        sizes=sizes,
        offsets=fitted.offsets,
        workspace_bytes=fitted.workspace_bytes,
        largest_live_bytes=fitted.largest_live_bytes,
        weights=bytes(draft.weights),
        inputs=inputs,
        outputs=outputs,
        dynamic=trace is not None,
    )


def _generation(gpu: GpuTarget) -> Generation:
    """Return what the generation of this GPU adds, nothing for most."""
    rows: list[Generation] = [part.GENERATION for part in parts("generation")]
    return next((row for row in rows if row.applies(gpu)), NO_GENERATION)


def _rewritten(network: Network, generation: Generation, precision: Precision) -> Network:
    """Run all rewrites, quantized operators first."""
    own = precision != "fp32"
    network = read_quantized(apply_rules(network, EARLY_LAYOUT_RULES))
    network = merge_layout_chains(
        apply_rules(network, (*COMPOSITE_RULES, *LAYOUT_RULES, *PATCH_EMBEDDING_RULES, *GEMM_RULES))
    )
    network = push_through_concat(network)
    network = apply_rules(network, generation.early_rules if own else ())
    return apply_rules(network, (*SPACE_TO_DEPTH_RULES, *(generation.stem_rules if own else ())))


def _check(network: Network, emitters: Mapping[str, Emitter]) -> None:
    reasons = {
        op.name: f"node {op.name!r} ({op.kind}) has no kernel yet"
        for op in network.operations
        if op.kind not in emitters and not is_elementwise(op)
    }
    for name in (*network.inputs, *network.outputs):
        dtype = network.dtypes.get(name, "constant")
        if dtype in ELEMENT_TYPES:
            continue
        why = f"tensor {name!r} has the type {dtype}; kernels read and write "
        why += ", ".join(ELEMENT_TYPES)
        touching = [op for op in network.operations if name in (*op.inputs, *op.outputs)]
        if not touching:
            raise NotCoveredError(why)
        reasons |= {op.name: why for op in touching}
    if reasons:
        raise not_covered(reasons)


def _emit(draft: LoweringContext, groups: Sequence[Group], emitters: Mapping[str, Emitter]) -> None:
    """Add the work of all groups; raises NotCoveredError for all nodes that have no kernel."""
    reasons: dict[str, str] = {}
    for group in groups:
        emit = elementwise.emit_elementwise if group.root is None else emitters[group.root.kind]
        try:
            emit(draft, group)
        except NotCoveredError as error:
            reasons |= dict.fromkeys(group.nodes, str(error))
            results = (group.result, *(group.root.outputs if group.root else ()))
            for name in results:  # what comes after is judged as if it were there
                if name not in draft.views:
                    draft.output_view(name)
    if reasons:
        raise not_covered(reasons)


def _border(draft: LoweringContext, base: str, name: str) -> View:
    """Take memory for a tensor as it enters or leaves: rows first, in its own type."""
    shape = draft.network.shapes[name]
    return draft.allocate(base, draft.network.dtypes[name], shape, row_major(shape))


def _output(draft: LoweringContext, name: str, taken: set[str]) -> View:
    """Return where an output lies; copies it where the segment must not hand out its memory."""
    view = draft.read(name)
    whole = view.offset == 0 and draft.allocations.get(view.base) == _bytes(view)
    own = view.base not in (*draft.network.inputs, *taken, WEIGHTS)
    if whole and own and view.is_row_major() and view.dtype == draft.network.dtypes[name]:
        return view
    target = _border(draft, f"{name} (output)", name)
    draft.add_elementwise(target, [view], (), ())
    return target


def _bytes(view: View) -> int:
    return view.elements * view.item_bytes
