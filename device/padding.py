"""ONNX's automatic padding (`auto_pad`), in the one place that computes it."""


def is_same(auto_pad: str) -> bool:
    """True for `SAME_UPPER` and `SAME_LOWER`."""
    return auto_pad in ("SAME_UPPER", "SAME_LOWER")


def same_padding(
    size: int, positions: int, *, stride: int, span: int, upper: bool
) -> tuple[int, int]:
    """Return the padding before and after one axis: a window takes `positions` steps over `size`.

    `span` counts elements from the first tap to the last: (kernel - 1) * dilation + 1. The odd
    element goes after the axis, before it with SAME_LOWER (`upper` False). A transposed convolution
    crops what the convolution from its result to its input pads: there `size` is that of the
    result less the output padding, and `positions` the size of the input. Sizes may be symbolic.
    """
    total = max(0, (positions - 1) * stride + span - size)
    half = total // 2
    return (half, total - half) if upper else (total - half, half)
