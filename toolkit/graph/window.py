"""The sliding window of convolutions and poolings, with ONNX's automatic padding resolved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from device.engine.manifest import Dim
from device.padding import is_same, same_padding

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

    @property
    def spans(self) -> tuple[int, ...]:
        """Elements from the first tap to the last, per axis."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def before(self) -> tuple[int, ...]:
        """Padding before each axis; raises ValueError where it is not known."""
        return self._known_pads[: len(self.kernel)]

    @property
    def after(self) -> tuple[int, ...]:
        """Padding after each axis; raises ValueError where it is not known."""
        return self._known_pads[len(self.kernel) :]

    @property
    def is_pointwise(self) -> bool:
        """True for a 1x1 kernel of stride 1 without padding."""
        return set(self.kernel) == {1} and not any(self._known_pads) and set(self.strides) == {1}

    @property
    def _known_pads(self) -> tuple[int, ...]:
        if self.pads is None:
            raise ValueError("the padding depends on a size that is not known")
        return self.pads

    def with_same_padding(
        self, sizes: Sequence[int], positions: Sequence[int], *, upper: bool
    ) -> "Window":
        """Return it with the padding that gives `positions` on `sizes` (`device.padding`)."""
        axes = zip(sizes, positions, self.strides, self.spans, strict=True)
        pairs = [
            same_padding(size, count, stride=stride, span=span, upper=upper)
            for size, count, stride, span in axes
        ]
        pads = (*(before for before, _ in pairs), *(after for _, after in pairs))
        return replace(self, pads=pads)


def resolve_window(
    op: str, attributes: Mapping[str, Attribute], data: Shape | None, weight: Shape | None
) -> Window | None:
    """Return the window of an operator, or None where it has none or its kernel is unknown."""
    kernel = _ints(attributes.get("kernel_shape"))
    if not kernel and weight is not None:
        kernel = tuple(dim for dim in weight[2:] if isinstance(dim, int))
    if op not in WINDOWED or not kernel:
        return None
    ones, zeros = (1,) * len(kernel), (0,) * (2 * len(kernel))
    strides = _ints(attributes.get("strides")) or ones
    dilations = _ints(attributes.get("dilations")) or ones
    mode = attributes.get("auto_pad", "NOTSET")
    if not (isinstance(mode, str) and is_same(mode)):
        pads = zeros if mode == "VALID" else _ints(attributes.get("pads")) or zeros
        return Window(kernel, strides, dilations, pads)
    window = Window(kernel, strides, dilations, None)
    if op == "ConvTranspose":  # input * stride elements, whatever the input: as for one element
        return window.with_same_padding(strides, ones, upper=mode == "SAME_UPPER")
    sizes = [dim for dim in (data or ())[2:] if isinstance(dim, int)]
    if len(sizes) != len(kernel):
        return window
    positions = [-(-size // stride) for size, stride in zip(sizes, strides, strict=True)]
    return window.with_same_padding(sizes, positions, upper=mode == "SAME_UPPER")


def _ints(value: Attribute | None) -> tuple[int, ...]:
    if not isinstance(value, tuple):
        return ()
    return tuple(item for item in value if isinstance(item, int))
