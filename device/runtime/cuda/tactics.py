"""Which of several ways to do a piece of work is taken, by times measured before.

Pure: the board and the build decide with the same functions.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import msgspec

from device.engine.cuda_manifest import CompiledKernel, Int32, Launch
from device.engine.cuda_sizes import evaluate

_KEY_CHARACTERS = 32  # 128 bits of the hash: no two tactics meet by chance


def tactic_key(
    launches: Sequence[Launch],
    kernels: Sequence[CompiledKernel],
    cubin_sha256: Callable[[int], str],
    point: Sequence[int] = (),
) -> str:
    """Return what names a tactic in every engine: the code that runs and the sizes it runs on.

    Where its tensors lie is left out; that they lie at multiples of 256 bytes is the same
    everywhere. `cubin_sha256` takes the number of a kernel; `point` are the sizes of the dynamic
    dimensions.
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


def fastest(keys: Sequence[str], times_us: Mapping[str, float]) -> int:
    """Return the place of the fastest tactic; the first unless all were timed."""
    if not all(key in times_us for key in keys):
        return 0
    return min(range(len(keys)), key=lambda at: times_us[keys[at]])
