"""A segment for the GPU, step by step: ONNX -> cubins, launches, weights and workspace.

1 read      ONNX -> operations, shapes, constants         toolkit.gpu.network
            Q/DQ -> tensors that lie as INT8              toolkit.gpu.quantized
            patterns -> fewer, larger operations          toolkit.gpu.pattern_rules
2 group     operations -> one kernel each                 toolkit.gpu.fusion
3 place     concatenations in place                       toolkit.gpu.places
4 emit      groups -> work, tensors -> views              toolkit.gpu.emitters
5 fit       allocations -> offsets in one workspace       toolkit.memory
6 compile   kernels -> cubins                             toolkit.gpu.compile
7 write     work -> launches of the engine                device.cuda_manifest

Steps 1 to 5 are `draft_segment`: pure, without Triton. A segment that kernels cannot compute as a
whole raises NotCoveredError and stays portable.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from device.cuda_manifest import (
    Argument,
    Cuda,
    Int32,
    Kernel,
    Launch,
    Null,
    Place,
    Tactic,
    Weights,
    Work,
    Workspace,
)
from device.manifest import Precision
from toolkit.gpu import call as calls
from toolkit.gpu import chains, places
from toolkit.gpu.agreement import Difference, find_difference, point_text
from toolkit.gpu.call import Call, KernelSpec
from toolkit.gpu.compile import Progress, compile_work
from toolkit.gpu.compile_messages import Compiled
from toolkit.gpu.draft import ALIGNMENT, WEIGHTS, Draft
from toolkit.gpu.dtypes import ELEMENT_TYPES
from toolkit.gpu.emitters import EMITTERS, Emitter
from toolkit.gpu.errors import NotCoveredError, not_covered
from toolkit.gpu.expressions import is_elementwise
from toolkit.gpu.functions import expand_functions
from toolkit.gpu.fusion import Group, group_operations
from toolkit.gpu.gpu import GpuTarget
from toolkit.gpu.move_rules import MOVE_RULES
from toolkit.gpu.network import Array, Network, read_network
from toolkit.gpu.pattern_rules import RULES
from toolkit.gpu.patterns import apply_rules
from toolkit.gpu.plugged import plugin_emitters
from toolkit.gpu.quantized import read_quantized
from toolkit.gpu.shapes import Trace
from toolkit.gpu.sizes import amount, most
from toolkit.gpu.view import View, row_major
from toolkit.memory import Lifetime, plan_memory
from toolkit.plugins import Plugin

# What lies on no INT8 grid is stored in this type.
_STORED: dict[Precision, str] = {"fp32": "float32", "fp16": "float16", "int8": "float16"}
# Triton's kernels end in two pointers to scratch memory that none of ours asks for.
_TRITON_TAIL: tuple[Argument, ...] = (Null(), Null())


@dataclass(frozen=True, slots=True)
class DraftedSegment:
    """A segment before compiling: work in order, where everything lies, packed weights.

    `offsets`: bytes from the start of the workspace to each allocation; `outputs` and `inputs`:
    views of the segment's tensors in the order of the segment. `dynamic`: sizes may be formulas,
    and what is planned in bytes is so for the largest ones.
    """

    work: tuple[calls.Work, ...]
    offsets: Mapping[str, int]
    workspace_bytes: int
    largest_live_bytes: int
    weights: bytes
    inputs: Mapping[str, View]
    outputs: Mapping[str, View]
    dynamic: bool = False

    @property
    def calls(self) -> tuple[Call, ...]:
        """What runs where nothing was measured: the first tactic of all work."""
        return tuple(call for work in self.work for call in work.tactics[0])


@dataclass(frozen=True, slots=True)
class GpuSegment:
    """A segment's `cuda` implementation with the entries that it adds to the engine file."""

    implementation: Cuda
    entries: Mapping[str, Array]
    kernels: tuple[Compiled, ...]
    workspace_bytes: int
    largest_live_bytes: int


def lower_gpu(
    name: str,
    segment: bytes,
    weights: Mapping[str, Array],
    *,
    gpu: GpuTarget,
    precision: Precision,
    on_progress: Progress | None = None,
) -> GpuSegment:
    """Lower a segment (ONNX bytes, and the weights kept beside them) for a GPU.

    Raises NotCoveredError: a node that no kernel computes, named with the reason; CompileError: a
    kernel does not compile or does not fit the GPU.
    """
    drafted = draft_segment(segment, weights, gpu=gpu, precision=precision)
    return compile_segment(name, drafted, gpu=gpu, on_progress=on_progress)


def compile_segment(
    name: str, drafted: DraftedSegment, *, gpu: GpuTarget, on_progress: Progress | None = None
) -> GpuSegment:
    """Do the rest; raises as `toolkit.gpu.compile.compile_work`."""
    work, compiled = compile_work(drafted.work, gpu, on_progress)
    return _written(name, replace(drafted, work=work), compiled, gpu)


def draft_segment(
    segment: bytes,
    weights: Mapping[str, Array],
    *,
    gpu: GpuTarget,
    precision: Precision,
    plugins: Sequence[Plugin] = (),
    traces: Sequence[Trace] = (),
) -> DraftedSegment:
    """Do all that needs no compiler; raises NotCoveredError, and PluginError of plugins' nodes.

    `traces`: points of the dynamic dimensions, the first of which blocks are chosen for. The draft
    holds for all of them; one that would not is not covered.
    """
    first: dict[str, str] = {}  # what is said of an operator itself, before its definition
    while True:
        try:
            draft = partial(
                _drafted, segment, weights, gpu=gpu, precision=precision, plugins=plugins
            )
            return _drafted_everywhere(draft, traces)
        except NotCoveredError as error:
            first = {**error.reasons, **first}
            expanded = expand_functions(segment, error.reasons)
            if expanded is None and not error.reasons:
                raise
            if expanded is None:
                raise not_covered({name: first[name] for name in error.reasons}) from error
            segment = expanded


def _drafted_everywhere(
    draft: Callable[[Trace | None], DraftedSegment], traces: Sequence[Trace]
) -> DraftedSegment:
    """Draft at every point, and return the first draft if all are the same."""
    first = draft(traces[0] if traces else None)
    for trace in traces[1:]:
        other = draft(trace)
        if other == first:
            continue
        found = find_difference(first.work, other.work) or Difference((), "has other constants")
        nodes = ", ".join(map(repr, found.nodes)) or "the segment"
        why = (
            f"{nodes} {found.what} at {point_text(traces[0].space)} and at "
            f"{point_text(trace.space)}; fix the sizes with --shape"
        )
        raise NotCoveredError(why, dict.fromkeys(found.nodes, why))
    return first


def _drafted(
    segment: bytes,
    weights: Mapping[str, Array],
    trace: Trace | None,
    *,
    gpu: GpuTarget,
    precision: Precision,
    plugins: Sequence[Plugin],
) -> DraftedSegment:
    emitters = {**EMITTERS, **plugin_emitters(plugins)}
    network = read_quantized(read_network(segment, weights, emitters, trace))
    network = apply_rules(network, (*RULES, *MOVE_RULES))
    _check(network, emitters)
    groups = group_operations(network)
    draft = Draft(network, gpu, _STORED[precision])
    inputs = {name: _border(draft, name, name) for name in network.inputs}
    draft.views.update(inputs)
    places.plan_homes(draft, groups)
    _emit(draft, groups, emitters)
    outputs: dict[str, View] = {}
    for name in network.outputs:
        outputs[name] = _output(draft, name, {view.base for view in outputs.values()})
    lives = _lifetimes(draft, tuple(inputs.values()), tuple(outputs.values()))
    memory = plan_memory(lives)
    return DraftedSegment(
        work=tuple(draft.work),
        offsets={buffer.tensor: buffer.offset for buffer in memory.buffers},
        workspace_bytes=memory.arena_bytes,
        largest_live_bytes=_largest_live(lives),
        weights=bytes(draft.weights),
        inputs=inputs,
        outputs=outputs,
        dynamic=trace is not None,
    )


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


def _emit(draft: Draft, groups: Sequence[Group], emitters: Mapping[str, Emitter]) -> None:
    """Add the work of all groups; raises NotCoveredError for all nodes that have no kernel."""
    reasons: dict[str, str] = {}
    for group in groups:
        emit = chains.emit_elementwise if group.root is None else emitters[group.root.kind]
        try:
            emit(draft, group)
        except NotCoveredError as error:
            reasons |= dict.fromkeys(group.nodes, str(error))
            made = (group.result, *(group.root.outputs if group.root else ()))
            for name in made:  # what comes after is judged as if it were there
                if name not in draft.views:
                    draft.make(name)
    if reasons:
        raise not_covered(reasons)


def _border(draft: Draft, base: str, name: str) -> View:
    """Take memory for a tensor as it enters or leaves: rows first, in its own type."""
    shape = draft.network.shapes[name]
    return draft.allocate(base, draft.network.dtypes[name], shape, row_major(shape))


def _output(draft: Draft, name: str, taken: set[str]) -> View:
    """Return where an output lies; copies it where the segment must not hand out its memory."""
    view = draft.read(name)
    whole = view.offset == 0 and draft.allocations.get(view.base) == _bytes(view)
    own = view.base not in (*draft.network.inputs, *taken, WEIGHTS)
    if whole and own and view.is_row_major() and view.dtype == draft.network.dtypes[name]:
        return view
    target = _border(draft, f"{name} (output)", name)
    draft.elementwise(target, [view], (), ())
    return target


def _bytes(view: View) -> int:
    return view.elements * view.item_bytes


def _lifetimes(
    draft: Draft, inputs: Sequence[View], outputs: Sequence[View]
) -> tuple[Lifetime, ...]:
    """Return from which piece of work to which every allocation is in use."""
    first = {view.base: 0 for view in inputs}
    last = dict(first)
    for at, one in enumerate(draft.work):
        for base in one.touched:
            first.setdefault(base, at)
            last[base] = at
    last.update({view.base: len(draft.work) for view in outputs})
    return tuple(
        Lifetime(base, most(draft.allocations[base]), first[base], last[base]) for base in first
    )


def _largest_live(lives: Sequence[Lifetime]) -> int:
    """Return the most bytes alive at once: no workspace can be smaller."""
    ends = {life.first for life in lives}
    return max(
        (sum(one.bytes for one in lives if one.first <= at <= one.last) for at in ends), default=0
    )


def _written(
    name: str, drafted: DraftedSegment, compiled: Mapping[KernelSpec, Compiled], gpu: GpuTarget
) -> GpuSegment:
    """Return the implementation and its entries, with equal cubins stored once."""
    kernels = {one.sha256: one for one in compiled.values()}
    index = {sha256: at for at, sha256 in enumerate(kernels)}
    weights = f"cuda/{name}.weights"
    entries: dict[str, Array] = {
        _cubin_entry(gpu, one): np.frombuffer(one.cubin, np.uint8) for one in kernels.values()
    }
    entries[weights] = np.frombuffer(drafted.weights.ljust(1, b"\0"), np.uint8)
    implementation = Cuda(
        sm=gpu.sm,
        kernels=tuple(
            Kernel(
                cubin=_cubin_entry(gpu, one),
                function=one.function,
                threads=one.threads,
                shared_bytes=one.shared_bytes,
                registers=one.registers,
                spill_bytes=one.spill_bytes,
            )
            for one in kernels.values()
        ),
        works=tuple(
            Work(
                nodes=one.nodes,
                tactics=tuple(
                    Tactic(
                        launches=tuple(
                            _launch(call, compiled[call.spec], index, drafted) for call in tactic
                        )
                    )
                    for tactic in one.tactics
                ),
            )
            for one in drafted.work
        ),
        weights=weights,
        workspace_bytes=_aligned(drafted.workspace_bytes),
        inputs=_places(drafted.inputs, drafted),
        outputs=_places(drafted.outputs, drafted),
    )
    return GpuSegment(
        implementation,
        entries,
        tuple(kernels.values()),
        drafted.workspace_bytes,
        drafted.largest_live_bytes,
    )


def _launch(
    call: Call, compiled: Compiled, index: Mapping[str, int], drafted: DraftedSegment
) -> Launch:
    in_cuda = call.spec.source is not None and call.spec.source.in_cuda
    given = {n: a for (n, _), a in zip(call.spec.signature, call.arguments, strict=True)}
    arguments = tuple(_argument(given[name], drafted) for name in compiled.parameters)
    return Launch(
        kernel=index[compiled.sha256],
        grid=(amount(call.grid[0]), amount(call.grid[1]), amount(call.grid[2])),
        arguments=arguments + (() if in_cuda else _TRITON_TAIL),
    )


def _argument(argument: calls.Argument, drafted: DraftedSegment) -> Argument:
    if isinstance(argument, int):
        return Int32(amount(argument))
    if isinstance(argument, calls.InWeights):
        return Weights(amount(argument.offset))
    return Workspace(amount(drafted.offsets[argument.base] + argument.offset))


def _places(views: Mapping[str, View], drafted: DraftedSegment) -> tuple[Place, ...]:
    return tuple(
        Place(
            tensor=name,
            offset=drafted.offsets[view.base],
            bytes=most(_bytes(view)),
            shape=tuple(map(amount, view.shape)) if drafted.dynamic else None,
        )
        for name, view in views.items()
    )


def _cubin_entry(gpu: GpuTarget, one: Compiled) -> str:
    return f"cuda/sm_{gpu.sm}/{one.sha256[:32]}.cubin"


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
