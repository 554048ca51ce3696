"""A drafted segment -> its part of the engine: cubins, chosen tactics, launches, weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from device.engine.cuda_manifest import (
    Argument,
    CompiledKernel,
    Cuda,
    Int32,
    Launch,
    Null,
    Place,
    Tactic,
    TunableOp,
    Weights,
    Workspace,
)
from device.engine.manifest import DimRange, Precision
from device.runtime.cuda.tactics import tactic_key
from toolkit.errors import BuildError
from toolkit.gpu.codegen.compile import Progress, compile_ops
from toolkit.gpu.codegen.messages import Compiled
from toolkit.gpu.emit.context import ALIGNMENT
from toolkit.gpu.ir import launch as calls
from toolkit.gpu.ir.launch import KernelLaunch, KernelSpec
from toolkit.gpu.ir.network import Array
from toolkit.gpu.ir.view import View
from toolkit.gpu.lower import KernelProgram, lower_segment
from toolkit.gpu.schedule.tactics import TacticOptions, fastest_first, timed_text, times_for
from toolkit.gpu.schedule.workspace import fit_workspace
from toolkit.gpu.shapes.sizes import amount, most
from toolkit.gpu.target import GpuTarget

# Triton's kernels end in two pointers to scratch memory that none of ours asks for.
_TRITON_TAIL: tuple[Argument, ...] = (Null(), Null())


@dataclass(frozen=True, slots=True)
class GpuSegment:
    """A segment's `cuda` implementation with the entries that it adds to the engine file.

    `notes` say how its tactics were chosen.
    """

    implementation: Cuda
    entries: Mapping[str, Array]
    kernels: tuple[Compiled, ...]
    workspace_bytes: int
    largest_live_bytes: int
    notes: tuple[str, ...] = ()


def lower_gpu(
    name: str,
    segment: ir.Model,
    *,
    gpu: GpuTarget,
    precision: Precision,
    tactics: TacticOptions | None = None,
    on_progress: Progress | None = None,
) -> GpuSegment:
    """Lower a segment for a GPU, and compile it.

    Raises NotCoveredError: a node that no kernel computes, named with the reason; CompileError: a
    kernel does not compile or does not fit the GPU.
    """
    drafted = lower_segment(segment, gpu=gpu, precision=precision)
    return compile_segment(name, drafted, gpu=gpu, tactics=tactics, on_progress=on_progress)


def compile_segment(
    name: str,
    drafted: KernelProgram,
    *,
    gpu: GpuTarget,
    dims: Sequence[DimRange] = (),
    tactics: TacticOptions | None = None,
    on_progress: Progress | None = None,
) -> GpuSegment:
    """Compile the tactics of a segment, choose among them, and write its part of the engine.

    Times are looked up at the sizes that `dims` are built for. Raises as `codegen.compile_ops`, and
    BuildError: the workspace does not keep its limit.
    """
    tactics = tactics or TacticOptions()
    work, compiled = compile_ops(drafted.work, gpu, on_progress)
    drafted = replace(drafted, work=work)
    notes: tuple[str, ...] = ()
    if tactics.timings is not None:
        keys = _keys(drafted, compiled, gpu, [dim.opt for dim in dims])
        times = times_for(tactics.timings, gpu, keys)
        notes = (timed_text(name, keys, times, gpu),)
        if times is not None:
            # At other sizes another tactic may be the fastest, so dynamic segments keep all.
            work = fastest_first(work, keys, times, only=not drafted.dynamic)
    try:
        drafted = _fitted(replace(drafted, work=work), tactics.workspace_bytes)
    except BuildError as error:
        raise BuildError(f"segment {name}: {error}") from error
    used = {c.spec for op in drafted.work for tactic in op.tactics for c in tactic}
    compiled = {spec: kernel for spec, kernel in compiled.items() if spec in used}
    return _written(name, drafted, compiled, gpu, notes)


def _fitted(drafted: KernelProgram, limit: int | None) -> KernelProgram:
    """Return the segment with the workspace of the tactics that are left."""
    inputs, outputs = (
        [view.base for view in views.values()] for views in (drafted.inputs, drafted.outputs)
    )
    fitted = fit_workspace(drafted.work, drafted.sizes, inputs, outputs, limit)
    return replace(
        drafted,
        work=fitted.work,
        offsets=fitted.offsets,
        workspace_bytes=fitted.workspace_bytes,
        largest_live_bytes=fitted.largest_live_bytes,
    )


def _keys(
    drafted: KernelProgram,
    compiled: Mapping[KernelSpec, Compiled],
    gpu: GpuTarget,
    point: Sequence[int],
) -> list[list[str]]:
    """Return what names each tactic in a timing cache, by work."""
    kernels, index = _kernels(compiled, gpu), _index(compiled)
    sha256 = list(index)
    return [
        [
            tactic_key(_launches(t, compiled, index, drafted), kernels, sha256.__getitem__, point)
            for t in op.tactics
        ]
        for op in drafted.work
    ]


def _written(
    name: str,
    drafted: KernelProgram,
    compiled: Mapping[KernelSpec, Compiled],
    gpu: GpuTarget,
    notes: tuple[str, ...],
) -> GpuSegment:
    """Return the implementation and its entries, with equal cubins stored once."""
    kernels, index = _kernels(compiled, gpu), _index(compiled)
    cubins = {kernel.sha256: kernel for kernel in compiled.values()}
    weights = f"cuda/{name}.weights"
    entries: dict[str, Array] = {
        _cubin_entry(gpu, kernel): np.frombuffer(kernel.cubin, np.uint8)
        for kernel in cubins.values()
    }
    entries[weights] = np.frombuffer(drafted.weights.ljust(1, b"\0"), np.uint8)
    implementation = Cuda(
        sm=gpu.sm,
        kernels=kernels,
        works=tuple(
            TunableOp(
                nodes=op.nodes,
                tactics=tuple(
                    Tactic(launches=_launches(tactic, compiled, index, drafted))
                    for tactic in op.tactics
                ),
            )
            for op in drafted.work
        ),
        weights=weights,
        workspace_bytes=_aligned(drafted.workspace_bytes),
        inputs=_places(drafted.inputs, drafted),
        outputs=_places(drafted.outputs, drafted),
    )
    return GpuSegment(
        implementation,
        entries,
        tuple(cubins.values()),
        drafted.workspace_bytes,
        drafted.largest_live_bytes,
        notes,
    )


def _kernels(compiled: Mapping[KernelSpec, Compiled], gpu: GpuTarget) -> tuple[CompiledKernel, ...]:
    """Return the kernels of the engine, each cubin once."""
    return tuple(
        CompiledKernel(
            cubin=_cubin_entry(gpu, kernel),
            function=kernel.function,
            threads=kernel.threads,
            shared_bytes=kernel.shared_bytes,
            registers=kernel.registers,
            spill_bytes=kernel.spill_bytes,
            waits=kernel.waits,
        )
        for kernel in {kernel.sha256: kernel for kernel in compiled.values()}.values()
    )


def _index(compiled: Mapping[KernelSpec, Compiled]) -> dict[str, int]:
    """Return the place of each cubin among them."""
    return {sha: at for at, sha in enumerate(dict.fromkeys(c.sha256 for c in compiled.values()))}


def _launches(
    tactic: calls.Tactic,
    compiled: Mapping[KernelSpec, Compiled],
    index: Mapping[str, int],
    drafted: KernelProgram,
) -> tuple[Launch, ...]:
    return tuple(_launch(call, compiled[call.spec], index, drafted) for call in tactic)


def _launch(
    call: KernelLaunch, compiled: Compiled, index: Mapping[str, int], drafted: KernelProgram
) -> Launch:
    in_cuda = call.spec.source is not None and call.spec.source.in_cuda
    by_name = {n: a for (n, _), a in zip(call.spec.signature, call.arguments, strict=True)}
    arguments = tuple(_argument(by_name[name], drafted) for name in compiled.parameters)
    return Launch(
        kernel=index[compiled.sha256],
        grid=(amount(call.grid[0]), amount(call.grid[1]), amount(call.grid[2])),
        arguments=arguments + (() if in_cuda else _TRITON_TAIL),
    )


def _argument(argument: calls.Argument, drafted: KernelProgram) -> Argument:
    if isinstance(argument, int):
        return Int32(amount(argument))
    if isinstance(argument, calls.InWeights):
        return Weights(amount(argument.offset))
    return Workspace(amount(drafted.offsets[argument.base] + argument.offset))


def _places(views: Mapping[str, View], drafted: KernelProgram) -> tuple[Place, ...]:
    return tuple(
        Place(
            tensor=name,
            offset=drafted.offsets[view.base],
            bytes=most(_bytes(view)),
            shape=tuple(map(amount, view.shape)) if drafted.dynamic else None,
        )
        for name, view in views.items()
    )


def _bytes(view: View) -> int:
    return view.elements * view.item_bytes


def _cubin_entry(gpu: GpuTarget, one: Compiled) -> str:
    return f"cuda/sm_{gpu.sm}/{one.sha256[:32]}.cubin"


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
