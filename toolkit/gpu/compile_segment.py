"""A lowered segment -> its part of the engine: cubins, chosen tactics, launches, weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import UNSET

from device.engine.cuda_manifest import (
    Argument,
    CompiledKernel,
    Cuda,
    Int32,
    Launch,
    Null,
    Tactic,
    TunableOp,
    Weights,
    Workspace,
    WorkspaceTensor,
)
from device.engine.manifest import DimRange
from device.runtime.cuda.tactics import tactic_key
from toolkit.errors import BuildError
from toolkit.gpu.codegen.compile_kernels import compile_ops
from toolkit.gpu.codegen.messages import Compiled
from toolkit.gpu.emit.weights import ALIGNMENT
from toolkit.gpu.ir.launch import Argument as IrArgument
from toolkit.gpu.ir.launch import InWeights, KernelLaunch, KernelSpec
from toolkit.gpu.ir.network import Array
from toolkit.gpu.ir.view import View
from toolkit.gpu.lower import KernelProgram, fit_program
from toolkit.gpu.schedule.tactics import TacticOptions, fastest_first, timed_text, times_for
from toolkit.gpu.shapes.sizes import amount, upper_bound
from toolkit.gpu.target import GpuTarget
from toolkit.progress import Progress

# The last two parameters of every Triton kernel: scratch pointers, unused here.
_TRITON_SCRATCH_POINTERS: tuple[Argument, ...] = (Null(), Null())


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


def compile_segment(
    name: str,
    program: KernelProgram,
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
    ops, compiled = compile_ops(program.ops, gpu, on_progress)
    program = replace(program, ops=ops)
    notes: tuple[str, ...] = ()
    if tactics.timings is not None:
        keys = _keys(_Compiled(program, compiled, gpu), [dim.opt for dim in dims])
        times = times_for(tactics.timings, gpu, keys)
        notes = (timed_text(name, keys, times, gpu),)
        if times is not None:
            # Another tactic may be faster at other sizes, so dynamic segments keep all.
            ops = fastest_first(ops, keys, times, only=not program.dynamic)
    try:
        program = fit_program(
            ops,
            program.sizes,
            program.inputs,
            program.outputs,
            weights=program.weights,
            dynamic=program.dynamic,
            limit=tactics.workspace_bytes,
            apart=program.borders_at is not None,
        )
    except BuildError as error:
        raise BuildError(f"segment {name}: {error}") from error
    used = {launch.spec for op in program.ops for tactic in op.tactics for launch in tactic}
    compiled = {spec: kernel for spec, kernel in compiled.items() if spec in used}
    return _segment_part(name, _Compiled(program, compiled, gpu), notes)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A program with its kernels, as the manifest holds them: each cubin once."""

    program: KernelProgram
    by_spec: Mapping[KernelSpec, Compiled]
    gpu: GpuTarget

    @property
    def cubins(self) -> dict[str, Compiled]:
        """The kernels by the SHA-256 of their cubin, in the order of the engine."""
        return {kernel.sha256: kernel for kernel in self.by_spec.values()}

    def kernels(self) -> tuple[CompiledKernel, ...]:
        """Return the kernels of the engine."""
        return tuple(
            CompiledKernel(
                cubin=_cubin_entry(self.gpu, kernel),
                function=kernel.function,
                threads=kernel.threads,
                shared_bytes=kernel.shared_bytes,
                registers=kernel.registers,
                spill_bytes=kernel.spill_bytes,
                waits=kernel.waits,
            )
            for kernel in self.cubins.values()
        )

    def tactics(self) -> list[list[tuple[Launch, ...]]]:
        """Return the launches of every tactic, by operation."""
        index = {sha256: at for at, sha256 in enumerate(self.cubins)}
        return [
            [tuple(self._launch(launch, index) for launch in tactic) for tactic in op.tactics]
            for op in self.program.ops
        ]

    def _launch(self, launch: KernelLaunch, index: Mapping[str, int]) -> Launch:
        compiled = self.by_spec[launch.spec]
        in_cuda = launch.spec.source is not None and launch.spec.source.in_cuda
        by_name = {n: a for (n, _), a in zip(launch.spec.signature, launch.arguments, strict=True)}
        arguments = tuple(_argument(by_name[name], self.program) for name in compiled.parameters)
        return Launch(
            kernel=index[compiled.sha256],
            grid=(amount(launch.grid[0]), amount(launch.grid[1]), amount(launch.grid[2])),
            arguments=arguments + (() if in_cuda else _TRITON_SCRATCH_POINTERS),
        )


def _keys(compiled: _Compiled, point: Sequence[int]) -> list[list[str]]:
    """Return the timing-cache key of every tactic, by operation."""
    kernels, sha256 = compiled.kernels(), list(compiled.cubins)
    return [
        [tactic_key(launches, kernels, sha256.__getitem__, point) for launches in tactics]
        for tactics in compiled.tactics()
    ]


def _segment_part(name: str, compiled: _Compiled, notes: tuple[str, ...]) -> GpuSegment:
    """Return the implementation and its entries, with equal cubins stored once."""
    program, gpu, cubins = compiled.program, compiled.gpu, compiled.cubins
    weights = f"cuda/{name}.weights"
    entries: dict[str, Array] = {
        _cubin_entry(gpu, kernel): np.frombuffer(kernel.cubin, np.uint8)
        for kernel in cubins.values()
    }
    entries[weights] = np.frombuffer(program.weights.ljust(1, b"\0"), np.uint8)
    implementation = Cuda(
        sm=gpu.sm,
        kernels=compiled.kernels(),
        works=tuple(
            TunableOp(nodes=op.nodes, tactics=tuple(Tactic(launches=t) for t in tactics))
            for op, tactics in zip(program.ops, compiled.tactics(), strict=True)
        ),
        weights=weights,
        workspace_bytes=_aligned(program.workspace_bytes),
        inputs=_workspace_tensors(program.inputs, program),
        outputs=_workspace_tensors(program.outputs, program),
        borders_at=UNSET if program.borders_at is None else program.borders_at,
    )
    return GpuSegment(
        implementation,
        entries,
        tuple(cubins.values()),
        program.workspace_bytes,
        program.largest_live_bytes,
        notes,
    )


def _argument(argument: IrArgument, program: KernelProgram) -> Argument:
    if isinstance(argument, int):
        return Int32(amount(argument))
    if isinstance(argument, InWeights):
        return Weights(amount(argument.offset))
    return Workspace(amount(program.offsets[argument.base] + argument.offset))


def _workspace_tensors(
    views: Mapping[str, View], program: KernelProgram
) -> tuple[WorkspaceTensor, ...]:
    return tuple(
        WorkspaceTensor(
            tensor=name,
            offset=program.offsets[view.base],
            bytes=upper_bound(view.nbytes),
            shape=tuple(map(amount, view.shape)) if program.dynamic else None,
        )
        for name, view in views.items()
    )


def _cubin_entry(gpu: GpuTarget, kernel: Compiled) -> str:
    return f"cuda/sm_{gpu.sm}/{kernel.sha256[:32]}.cubin"


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
