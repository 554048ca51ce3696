"""The outputs that a decoder expects, as data: names, axes and element types."""

from collections.abc import Mapping
from dataclasses import dataclass

from device.engine.manifest import Dim, TensorInfo

CLASSES = "classes"  # the size that is the number of labels
COEFFICIENTS = "coefficients"  # mask coefficients of an object: the channels of the prototypes
MAP_HEIGHT, MAP_WIDTH = "map height", "map width"  # in the ratio of the input's sides
FLOATS = ("float32", "float16")
INTEGERS = ("int64", "int32", "uint8", "bool")
NUMBERS = (*FLOATS, *INTEGERS)


@dataclass(frozen=True, slots=True)
class Size:
    """`times` * the sum of named sizes + `plus`; a name stands for one number wherever it is."""

    names: tuple[str, ...]
    times: int = 1
    plus: int = 0

    def text(self, sizes: Mapping[str, int]) -> str:
        """Return "84" where the sizes are known, else "4+classes"."""
        unknown = [name for name in self.names if name not in sizes]
        known = self.plus + self.times * sum(sizes.get(name, 0) for name in self.names)
        times = f"{self.times}x" if self.times != 1 else ""
        return "+".join([str(known)] * bool(known or not unknown) + [times + n for n in unknown])

    def solve(self, size: int, sizes: dict[str, int]) -> bool:
        """Settle the one unknown name by an actual size; False if no number above 0 does."""
        unknown = [name for name in self.names if name not in sizes]
        total, rest = divmod(size - self.plus, self.times)
        value = total - sum(sizes.get(name, 0) for name in self.names)
        if not unknown:
            return value == 0 and rest == 0
        if len(unknown) == 1 and rest == 0 and value > 0:
            sizes[unknown[0]] = value
            return True
        return len(unknown) > 1 and rest == 0 and value >= len(unknown)


Axis = int | str | Size  # a number, a named size, or a sum of them


@dataclass(frozen=True, slots=True)
class Expected:
    """One output that a decoder reads: the key of [decode] that names it, and its `name` there.

    `more_ones`: further axes of size 1 may follow. `leading_one`: a first axis of size 1 may be
    missing.
    """

    key: str
    name: str
    axes: tuple[Axis, ...]
    dtypes: tuple[str, ...] = FLOATS
    more_ones: bool = False
    leading_one: bool = False

    def text(self, sizes: Mapping[str, int]) -> str:
        """Return "scores [1, classes, 8400]", with the sizes that are known."""
        axes = [_size_of(axis).text(sizes) if axis != 1 else "1" for axis in self.axes]
        return f"{self.key} [{', '.join(axes)}]"

    def fits(self, info: TensorInfo, sizes: dict[str, int]) -> bool:
        """True if an output may be this one; sizes that it settles are added to `sizes`."""
        axes = self.axes
        shape = tuple(info.shape)
        if self.leading_one and len(shape) == len(axes) - 1:
            axes = axes[1:]
        if self.more_ones:
            axes += (1,) * (len(shape) - len(axes))
        if info.dtype not in self.dtypes or len(shape) != len(axes):
            return False
        known_sizes = dict(sizes)
        if not all(
            _fits_axis(axis, dim, known_sizes) for axis, dim in zip(axes, shape, strict=True)
        ):
            return False
        sizes.update(known_sizes)
        return True


def tensor_text(info: TensorInfo) -> str:
    """Return "'scores' float32 [1, 80, ?]"."""
    sizes = ", ".join("?" if size is None else str(size) for size in info.shape)
    return f"{info.name!r} {info.dtype} [{sizes}]"


def _size_of(axis: Axis) -> Size:
    if isinstance(axis, Size):
        return axis
    return Size((axis,)) if isinstance(axis, str) else Size((), plus=axis)


def _fits_axis(axis: Axis, dim: Dim, sizes: dict[str, int]) -> bool:
    return _size_of(axis).solve(dim, sizes) if isinstance(dim, int) else True
