"""Two operators of stereo vision, for which ONNX has none: depth from a pair of pictures.

    CostVolume       cost[n, d, y, x] = mean over c of left[n, c, y, x] * right[n, c, y, x - d]
    SoftDisparity    disparity[n, y, x] = sum over d of d * softmax over d of cost[n, d, y, x]

for d = 0 .. disparities - 1; outside a picture is 0. Exported from PyTorch, the first becomes a
slice, a product, a mean and a pad for each d. Here it is one kernel in Triton, and the second one
in CUDA C++.
"""

from collections.abc import Sequence
from pathlib import Path

from onnx.parser import parse_function
from tandem.plugins import Kernel, Launch, Node, Plugin, Shape

FOLDER = Path(__file__).parent
COLUMNS = 64  # pixels of a row that one block of CostVolume makes, for all disparities
THREADS = 128  # pixels that one block of SoftDisparity makes


COST_VOLUME = parse_function("""
<domain: "tandem.stereo", opset_import: ["" : 19]>
CostVolume <disparities> (left, right) => (cost) {
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    zeros = Constant <value_ints = [0]> ()
    ones = Constant <value_ints = [1]> ()
    last = Constant <value_ints = [3]> ()
    count = Constant <value_int: int = @disparities> ()
    edge = Sub (count, one)

    before = Unsqueeze (edge, zeros)
    margins = Concat <axis = 0> (before, zeros)
    padded = Pad (right, margins, , last)
    width = Shape <start = 3, end = 4> (left)
    columns = Squeeze (width)
    x = Range (zero, columns, one)
    d = Range (zero, count, one)
    d_column = Unsqueeze (d, ones)
    x_less_d = Sub (x, d_column)
    index = Add (x_less_d, edge)
    shifted = Gather <axis = 3> (padded, index)

    left_5d = Unsqueeze (left, last)
    product = Mul (left_5d, shifted)
    mean = ReduceMean <keepdims = 0> (product, ones)
    cost = Transpose <perm = [0, 2, 1, 3]> (mean)
}
""")

SOFT_DISPARITY = parse_function("""
<domain: "tandem.stereo", opset_import: ["" : 19]>
SoftDisparity (cost) => (disparity) {
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    count = Shape <start = 1, end = 2> (cost)
    end = Squeeze (count)
    d = Range (zero, end, one)
    d_float = CastLike (d, cost)
    places = Constant <value_ints = [0, 2, 3]> ()
    d_column = Unsqueeze (d_float, places)
    share = Softmax <axis = 1> (cost)
    parts = Mul (share, d_column)
    axis = Constant <value_ints = [1]> ()
    disparity = ReduceSum <keepdims = 0> (parts, axis)
}
""")


def cost_volume_shapes(node: Node) -> Sequence[Shape]:
    """(N, C, H, W) twice -> (N, D, H, W)."""
    batch, _, height, width = node.input(0).shape
    return [(batch, int(node.number("disparities")), height, width)]


def cost_volume_launches(node: Node) -> Sequence[Launch]:
    """One block for each row of each picture and each 64 columns of it."""
    batch, channels, height, width = node.input(0).shape
    return [
        Launch(
            Kernel(FOLDER / "cost_volume.py", "cost_volume"),
            grid=(-(-width // COLUMNS), height, batch),
            arguments={
                "left": node.input(0),
                "right": node.input(1),
                "cost": node.outputs[0],
                "height": height,
                "width": width,
            },
            constants={
                "DISPARITIES": int(node.number("disparities")),
                "CHANNELS": channels,
                "COLUMNS": COLUMNS,
            },
        )
    ]


def soft_disparity_shapes(node: Node) -> Sequence[Shape]:
    """(N, D, H, W) -> (N, H, W)."""
    batch, _, height, width = node.input(0).shape
    return [(batch, height, width)]


def soft_disparity_launches(node: Node) -> Sequence[Launch]:
    """One thread for each pixel."""
    batch, disparities, height, width = node.input(0).shape
    return [
        Launch(
            Kernel(FOLDER / "soft_disparity.cu", "soft_disparity"),
            grid=(-(-batch * height * width // THREADS), 1, 1),
            arguments={
                "cost": node.input(0),
                "disparity": node.outputs[0],
                "batch": batch,
                "pixels": height * width,
            },
            constants={"DISPARITIES": disparities},
            warps=THREADS // 32,
        )
    ]


PLUGINS = (
    Plugin(COST_VOLUME, cost_volume_shapes, cost_volume_launches),
    Plugin(SOFT_DISPARITY, soft_disparity_shapes, soft_disparity_launches, floats=("float32",)),
)
