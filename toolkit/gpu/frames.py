"""The kernels that make an engine's input from a camera's frame: bytes in, one launch, no copy.

Sizes of the frame are arguments, so one engine takes every camera. What the preprocessing says is
compiled in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from device.engine.frame_manifest import FRAME_SIZES, MAX_FRAME_SIDE, FrameKernels, Pixels
from device.engine.manifest import DimRange, TensorInfo
from device.engine.preprocessing import Preprocessing
from toolkit.errors import BuildError
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.ir.launch import KernelLaunch, TunableOp
from toolkit.gpu.ir.network import Array
from toolkit.gpu.ir.view import View, row_major
from toolkit.gpu.lower import KernelProgram, fit_program
from toolkit.gpu.segments import GpuBackend
from toolkit.gpu.shapes.sizes import Space, ceil_div

PIXELS: tuple[Pixels, ...] = ("bgr", "nv12")
_CHANNELS = {"bgr": (0, 1, 2), "rgb": (2, 1, 0), "grey": (3,)}  # of the kernel
_BLOCK = 256  # pixels


def compile_frames(
    backend: GpuBackend, preprocessing: Preprocessing, inputs: Sequence[TensorInfo]
) -> tuple[tuple[FrameKernels, ...], Mapping[str, Array]]:
    """Return the kernels of the engine's first image input, and their entries of the file.

    Raises BuildError: no input takes such images. CompileError: a kernel does not compile.
    """
    tensor = _image_input(preprocessing, inputs)
    rows: list[FrameKernels] = []
    entries: dict[str, Array] = {}
    for pixels in PIXELS:
        program = frame_program(pixels, preprocessing, tensor)
        part = backend.compiler(f"frames.{pixels}", program, gpu=backend.gpu)
        rows.append(FrameKernels(pixels=pixels, tensor=tensor.name, kernels=part.implementation))
        entries |= part.entries
    return tuple(rows), entries


def frame_program(
    pixels: Pixels, preprocessing: Preprocessing, tensor: TensorInfo
) -> KernelProgram:
    """Return the launch that makes one image of the input `tensor`."""
    shape = tuple(dim for dim in tensor.shape[1:] if isinstance(dim, int))
    frame = View("frame", "uint8", (MAX_FRAME_SIDE**2 * 3,), (1,))
    image = View("image", tensor.dtype, shape, row_major(shape))
    ops = [TunableOp((), ((_launch(pixels, preprocessing, frame, image),),))]
    sizes = {view.base: view.nbytes for view in (frame, image)}
    return fit_program(ops, sizes, {"frame": frame}, {tensor.name: image})


def _launch(pixels: Pixels, preprocessing: Preprocessing, frame: View, image: View) -> KernelLaunch:
    strides = image.strides
    height, width = image.shape[1:]
    if preprocessing.layout == "nhwc":
        height, width = image.shape[:2]
        strides = (strides[2], strides[0], strides[1])
    space = Space(
        tuple(DimRange(name=n, min=1, opt=1, max=MAX_FRAME_SIDE) for n in FRAME_SIZES),
        (1,) * len(FRAME_SIZES),
    )
    numbers = list(zip(preprocessing.mean, preprocessing.std, strict=True))
    border = preprocessing.pad_value * preprocessing.scale
    launch = make_launch(
        "frame_to_input",
        (ceil_div(height * width, _BLOCK), 1, 1),
        {
            "frame": frame,
            "y": image,
            **{name: space.dim(at) for at, name in enumerate(FRAME_SIZES)},
        },
        {
            "PIXELS": pixels,
            "OUT_WIDTH": width,
            "OUT_HEIGHT": height,
            "Y_STRIDES": strides,
            "CHANNELS": _CHANNELS[preprocessing.color],
            "FACTORS": tuple(preprocessing.scale / std for _, std in numbers),
            "SHIFTS": tuple(mean / std for mean, std in numbers),
            "BORDER": tuple((border - mean) / std for mean, std in numbers),
            "BLOCK": _BLOCK,
        },
        writes=(image,),
    )
    # Further images of a batch begin where the one before ends, aligned or not.
    signature = tuple((name, kind.removesuffix(":16")) for name, kind in launch.spec.signature)
    return replace(launch, spec=replace(launch.spec, signature=signature))


def _image_input(preprocessing: Preprocessing, inputs: Sequence[TensorInfo]) -> TensorInfo:
    for tensor in inputs:
        sizes = [dim for dim in tensor.shape[1:] if isinstance(dim, int)]
        channels = sizes[2 if preprocessing.layout == "nhwc" else 0] if len(sizes) == 3 else 0
        if channels == preprocessing.channels and tensor.dtype == preprocessing.dtype:
            return tensor
    shapes = ", ".join(f"{t.name!r} {t.dtype} {list(t.shape)}" for t in inputs)
    raise BuildError(
        f"Frames become {preprocessing.layout} {preprocessing.dtype} images of"
        f" {preprocessing.channels} channels and a fixed size, and the model takes {shapes}: leave"
        " out `tandem build --preprocess-on gpu`, or fix the size with --shape."
    )
