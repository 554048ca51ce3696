"""Windows of convolutions and poolings over pictures, from ONNX attributes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.gemm import Three, Window
from toolkit.gpu.ir.network import Operation, Shape


@dataclass(frozen=True, slots=True)
class WindowNd:
    """What ONNX says of a window over any number of dimensions.

    `pads`: those before all dimensions, then those after; None where the sizes tell. `added`: the
    output padding of a transposed convolution.
    """

    taps: Shape
    strides: Shape
    dilations: Shape
    pads: Shape | None
    added: Shape
    auto: str

    @classmethod
    def read(cls, op: Operation, taps: Shape) -> "WindowNd":
        """Read the attributes of an operation whose window has these taps."""
        rank = len(taps)
        auto = op.text("auto_pad", "NOTSET")
        pads: Shape | None = op.integers("pads", (0,) * 2 * rank)
        if auto.startswith("SAME") or "output_shape" in op.attributes:
            pads = None
        return cls(
            taps=taps,
            strides=op.integers("strides", (1,) * rank),
            dilations=op.integers("dilations", (1,) * rank),
            pads=(0,) * 2 * rank if auto == "VALID" else pads,
            added=op.integers("output_padding", (0,) * rank),
            auto=auto,
        )

    @property
    def spans(self) -> Shape:
        """Inputs from the first tap to the last."""
        return tuple((t - 1) * d + 1 for t, d in zip(self.taps, self.dilations, strict=True))

    def pads_of_convolution(self, size: Shape, result: Shape) -> tuple[Shape, Shape]:
        """Return the pads before and after each dimension of size `size`."""
        if self.pads is not None:
            return self.pads[: len(size)], self.pads[len(size) :]
        totals = [
            max(0, (r - 1) * step + span - n)
            for n, r, step, span in zip(size, result, self.strides, self.spans, strict=True)
        ]
        halves = tuple(n // 2 for n in totals)
        others = tuple(n - half for n, half in zip(totals, halves, strict=True))
        return (others, halves) if self.auto == "SAME_LOWER" else (halves, others)

    def pads_of_transposed(self, size: Shape, result: Shape) -> Shape:
        """Return how many outputs before the first are left out."""
        if self.pads is not None:
            return self.pads[: len(size)]
        whole = zip(size, self.strides, self.spans, self.added, strict=True)
        totals = [
            (n - 1) * step + span + added - r
            for (n, step, span, added), r in zip(whole, result, strict=True)
        ]
        return tuple(n // 2 if self.auto == "SAME_UPPER" else n - n // 2 for n in totals)


def three(values: Sequence[int], missing: int) -> Three:
    """Return one to three numbers as three, `missing` ones first."""
    depth, row, column = (*(missing,) * (3 - len(values)), *values)
    return depth, row, column


def read_window(op: Operation, taps: tuple[int, ...], shape: Shape, result: Shape) -> Window:
    """Read the window of an operation on (N, C, H, W) -> `result`.

    Raises NotCoveredError for pictures of other than two dimensions.
    """
    if len(shape) != 4 or len(taps) != 2:
        raise NotCoveredError(
            f"node {op.name!r} ({op.kind}) has {len(shape) - 2} spatial dimensions; kernels take 2"
        )
    window = Window(
        taps=_pair(taps),
        strides=_pair(op.integers("strides", (1, 1))),
        dilations=_pair(op.integers("dilations", (1, 1))),
        pads=(0, 0, 0, 0),
    )
    auto = op.text("auto_pad", "NOTSET")
    if auto.startswith("SAME"):
        return replace(window, pads=_same_pads(auto, window, shape[2:], result[2:]))
    if auto == "VALID":
        return window
    top, left, bottom, right = op.integers("pads", window.pads)
    return replace(window, pads=(top, left, bottom, right))


def _pair(values: tuple[int, ...]) -> tuple[int, int]:
    return values[0], values[1]


def _same_pads(auto: str, window: Window, size: Shape, result: Shape) -> tuple[int, int, int, int]:
    """Pads that make ceil(size / stride) outputs; an odd one goes after, with SAME_LOWER before."""
    before, after = [], []
    for at in range(2):
        span = (window.taps[at] - 1) * window.dilations[at] + 1
        total = (result[at] - 1) * window.strides[at] + span - size[at]
        half, odd = divmod(max(0, total), 2)
        before.append(half + odd * (auto == "SAME_LOWER"))
        after.append(half + odd * (auto == "SAME_UPPER"))
    return before[0], before[1], after[0], after[1]
