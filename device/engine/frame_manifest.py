"""Kernels that make the input of an engine from a camera's frame, in the manifest.

A frame is bytes of any size; the result has the sizes and the type of the engine's input. One
kernel resizes, pads, orders channels, normalises and lays out, as the engine's preprocessing says.
"""

from typing import Literal

import msgspec

from device.engine.cuda_manifest import Cuda

Pixels = Literal["bgr", "nv12"]

# What is known of a frame only when it comes: d0, d1, ... of the kernel's arguments. Sizes are in
# pixels, `stride` (of a row) and `chroma` (bytes before the plane of chroma) in bytes. The frame is
# resized to inner_width x inner_height, and its corner put at (pad_x, pad_y) of the input.
FRAME_SIZES = (
    *("width", "height", "stride", "chroma"),
    *("inner_width", "inner_height", "pad_x", "pad_y"),
)
MAX_FRAME_SIDE = 16384  # pixels: places are counted with 32 bits


class FrameKernels(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """From one frame of `pixels` to one image of the input `tensor`.

    `kernels` read the place of their only input and write that of their only output, the image;
    both may lie anywhere.
    """

    pixels: Pixels
    tensor: str
    kernels: Cuda
