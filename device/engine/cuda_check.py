"""The rules for the `cuda` implementations of a manifest.

Every address that Tandem passes is inside the workspace or the weights, and every launch inside the
limits of the hardware. What a cubin does with an address is not checked: engines are code, so a
device takes only signed ones.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from msgspec import UNSET

from device.engine.cuda_manifest import (
    CompiledKernel,
    Cuda,
    Int32,
    Launch,
    Null,
    TunableOp,
    Workspace,
    WorkspaceTensor,
)
from device.engine.cuda_sizes import evaluate
from device.engine.manifest import ARENA_ALIGNMENT, ITEM_BYTES, DimRange, Segment, TensorInfo
from device.engine.manifest_facts import Facts, check_bytes_entry

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": the largest grid
# along x, y and z, the most threads of a block, and the most shared memory of one (sm_90).
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_THREADS = 1024
MAX_SHARED_BYTES = 227 * 1024
WARP = 32
FIRST_WAITING_SM = 90  # PTX ISA, "griddepcontrol", target notes
MAX_ARGUMENTS = 64
MAX_LAUNCHES = 100_000
MAX_WORKSPACE_BYTES = 2**40
_INT32 = 2**31
_FUNCTION = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")


def cuda(facts: Facts) -> Iterator[str]:
    """Cubins, launches and places of every cuda implementation fit the file and the hardware."""
    for segment in facts.manifest.segments:
        for program in segment.implementations:
            if isinstance(program, Cuda):
                where = f"segment {segment.name!r} (cuda)"
                yield from _sizes(program, where)
                yield from _entries(program, facts, where)
                yield from _boundary_tensors(program, segment, facts, where)
                for number, op in enumerate(program.works):
                    yield from _operation(op, program, f"{where}: operation {number}")
                yield from _at_ends(program, facts, where)


def of_port(program: Cuda, facts: Facts, where: str, point: Sequence[int] = ()) -> Iterator[str]:
    """Check kernels whose two tensors are not those of a segment; `point`: of their formulas."""
    yield from _sizes(program, where)
    yield from _entries(program, facts, where)
    for number, op in enumerate(program.works):
        yield from _operation(op, program, f"{where}: operation {number}")
    entry = facts.entries.get(program.weights)
    size = 0 if entry is None else entry.stop - entry.start
    for op in program.works:
        for tactic in op.tactics:
            for launch in tactic.launches:
                try:
                    yield from _launch_at(launch, program, point, size, where)
                except ValueError as error:
                    yield f"{where}: {error}"


def _at_ends(program: Cuda, facts: Facts, where: str) -> Iterator[str]:
    """Check what depends on sizes at the least, the best and the largest ones."""
    dims = facts.manifest.dims
    entry = facts.entries.get(program.weights)
    ends = ([dim.min for dim in dims], [dim.opt for dim in dims], [dim.max for dim in dims])
    for point in dict.fromkeys(map(tuple, ends)):
        size = 0 if entry is None else entry.stop - entry.start
        for problem in problems_at(program, point, size, facts.tensors, dims):
            yield f"{where}: {problem}"
            return


def _sizes(program: Cuda, where: str) -> Iterator[str]:
    if not 10 <= program.sm <= 999:
        yield f"{where} is for sm_{program.sm}; architectures are sm_10 to sm_999"
    if not 0 <= program.workspace_bytes <= MAX_WORKSPACE_BYTES:
        yield (
            f"{where} has a workspace of {program.workspace_bytes} bytes, the limits are 0 and "
            f"{MAX_WORKSPACE_BYTES}"
        )
    launches = sum(len(tactic.launches) for op in program.works for tactic in op.tactics)
    for title, count in (("kernels", len(program.kernels)), ("launches", launches)):
        if count > MAX_LAUNCHES:
            yield f"{where} has {count} {title}, the limit is {MAX_LAUNCHES}"


def _entries(program: Cuda, facts: Facts, where: str) -> Iterator[str]:
    for name in (program.weights, *(kernel.cubin for kernel in program.kernels)):
        yield from check_bytes_entry(facts, name, where)
    for kernel in program.kernels:
        yield from _kernel(kernel, program.sm, where)


def _kernel(kernel: CompiledKernel, sm: int, where: str) -> Iterator[str]:
    if _FUNCTION.fullmatch(kernel.function) is None:
        yield f"{where}: {kernel.function!r} is no name of a kernel"
    if not (0 < kernel.threads <= MAX_THREADS and kernel.threads % WARP == 0):
        yield (
            f"{where}: kernel {kernel.function} has {kernel.threads} threads; a block has a "
            f"multiple of {WARP} up to {MAX_THREADS}"
        )
    if not 0 <= kernel.shared_bytes <= MAX_SHARED_BYTES:
        yield (
            f"{where}: kernel {kernel.function} takes {kernel.shared_bytes} bytes of shared "
            f"memory, the limits are 0 and {MAX_SHARED_BYTES}"
        )
    if kernel.waits and sm < FIRST_WAITING_SM:
        yield (
            f"{where}: kernel {kernel.function} waits for the one before it on sm_{sm}; kernels "
            f"can from sm_{FIRST_WAITING_SM} on"
        )


def _boundary_tensors(program: Cuda, segment: Segment, facts: Facts, where: str) -> Iterator[str]:
    boundaries = (
        ("inputs", segment.inputs, program.inputs),
        ("outputs", segment.outputs, program.outputs),
    )
    for title, expected, tensors in boundaries:
        names = tuple(stored.tensor for stored in tensors)
        if names != expected:
            yield f"{where} places the {title} {list(names)}, the segment has {list(expected)}"
            return
        for stored in tensors:
            yield from _boundary_tensor(stored, program, facts, where)
    yield from _apart(program, where)


def _apart(program: Cuda, where: str) -> Iterator[str]:
    """Inputs and outputs that may lie elsewhere share no byte with each other or other tensors."""
    if program.borders_at is UNSET:
        return
    end, before = program.borders_at, "the tensors between"
    for stored in sorted((*program.inputs, *program.outputs), key=lambda stored: stored.offset):
        if stored.offset < end:
            yield (
                f"{where}: tensor {stored.tensor!r} lies at {stored.offset}, where {before} end at "
                f"{end}; inputs and outputs lie apart"
            )
        end, before = stored.offset + stored.bytes, repr(stored.tensor)


def _boundary_tensor(
    stored: WorkspaceTensor, program: Cuda, facts: Facts, where: str
) -> Iterator[str]:
    tensor = facts.tensors[stored.tensor]
    if stored.shape is None and all(isinstance(dim, int) for dim in tensor.shape):
        size = prod(dim for dim in tensor.shape if isinstance(dim, int)) * ITEM_BYTES[tensor.dtype]
        if stored.bytes != size:
            yield f"{where}: tensor {stored.tensor!r} has {size} bytes, here {stored.bytes}"
    elif stored.shape is None or len(stored.shape) != len(tensor.shape):
        yield f"{where}: tensor {stored.tensor!r} is dynamic, its shape in the workspace is not"
    if stored.offset < 0 or stored.offset % ARENA_ALIGNMENT:
        yield (
            f"{where}: tensor {stored.tensor!r} lies at {stored.offset}; it must be a multiple of "
            f"{ARENA_ALIGNMENT}"
        )
    if stored.bytes < 0 or stored.offset + stored.bytes > program.workspace_bytes:
        yield (
            f"{where}: tensor {stored.tensor!r} ends at {stored.offset + stored.bytes}, the "
            f"workspace at {program.workspace_bytes}"
        )


def _operation(op: TunableOp, program: Cuda, where: str) -> Iterator[str]:
    if not op.tactics:
        yield f"{where} has no tactic"
    for at, tactic in enumerate(op.tactics):
        for index, launch in enumerate(tactic.launches):
            yield from _launch(launch, program, f"{where}, tactic {at}, launch {index}")


def _launch(launch: Launch, program: Cuda, where: str) -> Iterator[str]:
    if not 0 <= launch.kernel < len(program.kernels):
        yield f"{where} starts kernel {launch.kernel} of {len(program.kernels)}"
    if len(launch.arguments) > MAX_ARGUMENTS:
        yield f"{where} has {len(launch.arguments)} arguments, the limit is {MAX_ARGUMENTS}"


def problems_at(
    program: Cuda,
    point: Sequence[int],
    weights_bytes: int,
    tensors: Mapping[str, TensorInfo],
    dims: Sequence[DimRange],
) -> Iterator[str]:
    """Say what does not fit at one set of sizes of the dynamic dimensions, in their order.

    These are the rules that formulas can break between the sizes that `cuda` looks at.
    """
    for stored in (*program.inputs, *program.outputs):
        yield from _fits(stored, tensors[stored.tensor], point, dims)
    for at, op in enumerate(program.works):
        for number, tactic in enumerate(op.tactics):
            for index, launch in enumerate(tactic.launches):
                where = f"operation {at}, tactic {number}, launch {index}"
                try:
                    yield from _launch_at(launch, program, point, weights_bytes, where)
                except ValueError as error:
                    yield f"{where}: {error}"


def _fits(
    stored: WorkspaceTensor, tensor: TensorInfo, point: Sequence[int], dims: Sequence[DimRange]
) -> Iterator[str]:
    """Check the shape and the bytes of a tensor whose sizes are formulas."""
    if stored.shape is None:
        return
    sizes = {dim.name: size for dim, size in zip(dims, point, strict=True)}
    try:
        shape = [evaluate(size, point) for size in stored.shape]
    except ValueError as error:
        yield f"tensor {stored.tensor!r}: {error}"
        return
    known = [sizes[dim] if isinstance(dim, str) else dim for dim in tensor.shape]
    if any(a not in (b, None) for a, b in zip(known, shape, strict=True)):
        yield f"tensor {stored.tensor!r} has the shape {known}, in the workspace {shape}"
    if min(shape, default=0) < 0 or prod(shape) * ITEM_BYTES[tensor.dtype] > stored.bytes:
        yield f"tensor {stored.tensor!r} of shape {shape} does not fit {stored.bytes} bytes"


def _launch_at(
    launch: Launch, program: Cuda, point: Sequence[int], weights_bytes: int, where: str
) -> Iterator[str]:
    """Check a launch at one set of sizes; raises ValueError for what is no formula."""
    grid = [evaluate(side, point) for side in launch.grid]
    if any(not 1 <= n <= limit for n, limit in zip(grid, MAX_GRID, strict=True)):
        yield f"{where} has the grid {grid}, the limits are 1 and {list(MAX_GRID)}"
    for argument in launch.arguments:
        if isinstance(argument, Int32):
            value = evaluate(argument.value, point)
            if not -_INT32 <= value < _INT32:
                yield f"{where} passes {value}, which is no integer of 32 bits"
        elif not isinstance(argument, Null):
            inside = isinstance(argument, Workspace)
            limit = program.workspace_bytes if inside else weights_bytes
            offset = evaluate(argument.offset, point)
            if inside and program.borders_at is not UNSET and offset >= program.borders_at:
                places = (*program.inputs, *program.outputs)
                if not any(p.offset <= offset < p.offset + p.bytes for p in places):
                    yield f"{where} passes the place {offset}, where no input or output lies"
            if not 0 <= offset < limit:
                title = "workspace" if inside else "weights"
                yield f"{where} passes the place {offset} of the {title}, which has {limit} bytes"
