"""The rules for the kernels that make inputs of frames."""

from collections.abc import Iterator
from math import prod

from device.engine.cuda_check import of_port
from device.engine.cuda_manifest import Workspace
from device.engine.frame_manifest import FRAME_SIZES, FrameKernels
from device.engine.manifest import ITEM_BYTES
from device.engine.manifest_facts import Facts


def frames(facts: Facts) -> Iterator[str]:
    """Kernels of frames fit the file and the hardware, and write an image of an input."""
    rows = facts.manifest.frames or ()
    pixels = [row.pixels for row in rows]
    if len(set(pixels)) < len(pixels):
        yield f"frames: two kernels take the same pixels, {', '.join(pixels)}"
    for row in rows:
        yield from _row(row, facts, f"frames of {row.pixels}")


def _row(row: FrameKernels, facts: Facts, where: str) -> Iterator[str]:
    program = row.kernels
    yield from of_port(program, facts, where, (1,) * len(FRAME_SIZES))
    if row.tensor not in facts.manifest.inputs:
        yield f"{where} become {row.tensor!r}, which is no input"
        return
    tensor = facts.tensors[row.tensor]
    sizes = [dim for dim in tensor.shape[1:] if isinstance(dim, int)]
    if len(sizes) != 3 or len(tensor.shape) != 4:
        yield f"{where} become {row.tensor!r} of shape {list(tensor.shape)}; it must be of images"
        return
    image_bytes = prod(sizes) * ITEM_BYTES[tensor.dtype]
    written = [stored.bytes for stored in program.outputs]
    if len(program.inputs) != 1 or written != [image_bytes]:
        yield (
            f"{where} have {len(program.inputs)} inputs and outputs of {written} bytes; they must"
            f" have one, and one of {image_bytes}"
        )
        return
    starts = {stored.offset for stored in (*program.inputs, *program.outputs)}
    for op in program.works:
        for launch in (launch for tactic in op.tactics for launch in tactic.launches):
            for argument in launch.arguments:
                if isinstance(argument, Workspace) and argument.offset not in starts:
                    yield f"{where} pass the place {argument.offset}; only {sorted(starts)} are"
