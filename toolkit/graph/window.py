"""The sliding window of convolutions and poolings, with ONNX's automatic padding resolved."""

from collections.abc import Mapping
from dataclasses import dataclass

from device.engine.manifest import Dim

Attribute = int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
Shape = tuple[Dim, ...]

WINDOWED = frozenset({"Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"})


@dataclass(frozen=True, slots=True)
class Window:
    """Kernel, strides, dilations and pads (all begins, then all ends), one entry per axis.

    `pads` is None where automatic padding meets an unknown input size.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...] | None


def resolve_window(
    op: str, attributes: Mapping[str, Attribute], data: Shape | None, weight: Shape | None
) -> Window | None:
    """Return the window of an operator, or None where it has none or its kernel is unknown."""
    kernel = _ints(attributes.get("kernel_shape"))
    if not kernel and weight is not None:
        kernel = tuple(dim for dim in weight[2:] if isinstance(dim, int))
    if op not in WINDOWED or not kernel:
        return None
    ones = (1,) * len(kernel)
    strides = _ints(attributes.get("strides")) or ones
    dilations = _ints(attributes.get("dilations")) or ones
    pads: tuple[int, ...] | None = _ints(attributes.get("pads")) or (0,) * (2 * len(kernel))
    mode = attributes.get("auto_pad", "NOTSET")
    if mode == "VALID":
        pads = (0,) * (2 * len(kernel))
    elif mode in ("SAME_UPPER", "SAME_LOWER"):
        spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
        totals = _same_totals(op, data, spans, strides)
        pads = None if totals is None else _halves(totals, upper=mode == "SAME_UPPER")
    return Window(kernel, strides, dilations, pads)


def _same_totals(
    op: str, data: Shape | None, spans: list[int], strides: tuple[int, ...]
) -> list[int] | None:
    """Return the padding per axis that gives input / stride (transposed: input * stride)."""
    if op == "ConvTranspose":
        return [max(0, span - stride) for span, stride in zip(spans, strides, strict=True)]
    sizes = [dim for dim in (data or ())[2:] if isinstance(dim, int)]
    if len(sizes) != len(spans):
        return None
    return [
        max(0, (-(-size // stride) - 1) * stride + span - size)
        for size, span, stride in zip(sizes, spans, strides, strict=True)
    ]


def _halves(totals: list[int], *, upper: bool) -> tuple[int, ...]:
    small, large = [t // 2 for t in totals], [t - t // 2 for t in totals]
    return tuple(small + large) if upper else tuple(large + small)


def _ints(value: Attribute | None) -> tuple[int, ...]:
    if not isinstance(value, tuple):
        return ()
    return tuple(item for item in value if isinstance(item, int))
