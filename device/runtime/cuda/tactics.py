"""The choice of an operation's tactic, by measured times.

Pure: the board and the build decide with the same functions.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import msgspec

from device.engine.cuda_manifest import CompiledKernel, Cuda, Int32, Launch
from device.engine.cuda_sizes import evaluate
from device.engine.file import Engine

_KEY_CHARACTERS = 32  # 128 bits of the hash: collisions do not occur


def tactic_key(
    launches: Sequence[Launch],
    kernels: Sequence[CompiledKernel],
    cubin_sha256: Callable[[int], str],
    point: Sequence[int] = (),
) -> str:
    """Return the key of a tactic in every engine: the hash of its code and of its sizes.

    The addresses of tensors do not count: all are multiples of 256 bytes. `cubin_sha256` takes the
    number of a kernel; `point` holds the sizes of the dynamic dimensions.
    """
    rows = []
    for launch in launches:
        kernel = kernels[launch.kernel]
        arguments = [
            evaluate(a.value, point) if isinstance(a, Int32) else type(a).__name__
            for a in launch.arguments
        ]
        rows.append(
            (
                cubin_sha256(launch.kernel),
                kernel.function,
                kernel.threads,
                kernel.shared_bytes,
                [evaluate(side, point) for side in launch.grid],
                arguments,
            )
        )
    return hashlib.sha256(msgspec.json.encode(rows)).hexdigest()[:_KEY_CHARACTERS]


def kernels_of(engine: Engine) -> Iterator[Cuda]:
    """Yield the kernels of each segment that has any."""
    for segment in engine.manifest.segments:
        yield from (
            implementation
            for implementation in segment.implementations
            if isinstance(implementation, Cuda)
        )


def choices_of(
    engine: Engine, implementation: Cuda, point: Sequence[int] = ()
) -> tuple[tuple[str, ...], ...]:
    """Return the keys of the tactics of each operation that has several, each such set once."""

    @cache
    def cubin_sha256(kernel: int) -> str:
        cubin = engine.entry(implementation.kernels[kernel].cubin)
        return hashlib.sha256(cubin.tobytes()).hexdigest()

    keys = (
        tuple(
            tactic_key(tactic.launches, implementation.kernels, cubin_sha256, point)
            for tactic in op.tactics
        )
        for op in implementation.works
        if len(op.tactics) > 1
    )
    return tuple(dict.fromkeys(keys))


def part_of(
    engine: Engine, implementation: Cuda, point: Sequence[int], part: int, parts: int
) -> frozenset[str]:
    """Return the keys of every `parts`-th choice of a segment, from number `part` on."""
    rows = choices_of(engine, implementation, point)[part::parts]
    return frozenset(key for row in rows for key in row)


def fastest(keys: Sequence[str], times_us: Mapping[str, float]) -> int:
    """Return the number of the fastest tactic; 0 unless all were timed."""
    if not all(key in times_us for key in keys):
        return 0
    return min(range(len(keys)), key=lambda number: times_us[keys[number]])
