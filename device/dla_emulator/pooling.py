"""Pooling nodes of a Q/DQ segment as windows of the DLA."""

from dataclasses import dataclass

from device.dla_emulator.arithmetic.convolution import Geometry
from device.dla_emulator.arithmetic.pooling import Window
from device.dla_emulator.segment_graph import Node
from device.padding import is_same


@dataclass(frozen=True, slots=True)
class PoolingNode:
    """A window that may depend on the input: with `size` None it covers all of it."""

    size: tuple[int, int] | None
    strides: tuple[int, int]
    pads: tuple[int, int, int, int]
    ceil_mode: bool
    auto_pad: str
    count_padding: bool

    def at(self, shape: tuple[int, ...]) -> Window:
        """Return the window on an input of the shape (batch, channels, height, width)."""
        size = self.size if self.size is not None else (shape[2], shape[3])
        pads = self.pads
        if is_same(self.auto_pad):
            pads = Geometry(size, self.strides).same(shape, self.auto_pad).pads
        return Window(size, self.strides, pads, self.ceil_mode)


def window_of(node: Node) -> PoolingNode | str:
    """Return a pooling node's window, or why the DLA has none such."""
    if node.op.startswith("Global"):
        return PoolingNode(None, (1, 1), (0, 0, 0, 0), False, "NOTSET", True)
    size = node.integers("kernel_shape", ())
    if len(size) != 2:
        return f"the DLA pools in 2 dimensions, this one in {len(size)}"
    if any(dilation != 1 for dilation in node.integers("dilations", (1, 1))):
        return "the DLA has no pooling with dilation"
    if len(node.outputs) > 1 and node.outputs[1]:
        return "the DLA gives no indices of maxima"
    strides, pads = node.integers("strides", (1, 1)), node.integers("pads", (0, 0, 0, 0))
    return PoolingNode(
        (size[0], size[1]),
        (strides[0], strides[1]),
        (pads[0], pads[1], pads[2], pads[3]),
        bool(node.integer("ceil_mode", 0)),
        node.text("auto_pad", "NOTSET"),
        not any(pads) or bool(node.integer("count_include_pad", 0)),
    )
