"""The lowering of one segment in the making: where tensors lie, packed weights, work so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.gpu.emit.schedule import MmaWarps, Schedule, no_mma_layout
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.dtypes import ELEMENT_TYPES, is_float
from toolkit.gpu.ir.elementwise_ops import ExprOp
from toolkit.gpu.ir.expressions import Expression, converting, expression_of, operands_of
from toolkit.gpu.ir.launch import (
    Argument,
    InTensor,
    InWeights,
    KernelLaunch,
    KernelSpec,
    Tactic,
    TunableOp,
)
from toolkit.gpu.ir.network import Network, Operation
from toolkit.gpu.ir.view import Shape, View, channels_last, like, row_major
from toolkit.gpu.schedule.loop_order import Order, Tiles, order_of, tiles_of
from toolkit.gpu.shapes.sizes import Size, ceil_div, opt, power_of_two
from toolkit.gpu.target import GpuTarget
from toolkit.plugins import Constant

Array = npt.NDArray[Any]
WEIGHTS = ""  # the base of views into the weights
ALIGNMENT = 256  # bytes; of every allocation and every weight
_BLOCK = 1024  # elements of one block of an element-wise kernel, at least
# Bytes of a block that only copies, and of one that computes; blocks for an SM at least. On an H200
# factors for the channels of INT8 took 33 us with blocks of 1024 bytes, 26 with 2048 and 4096
# (51 MB); copies of FP16 took as long with 2 KB as with 8 (131 MB: memory bounds them).
_COPIED_BYTES = 8192
_COMPUTED_BYTES = 2048
_BLOCKS_OF_SM = 4


@dataclass
class LoweringContext:
    """What the emitters read and add to; it lives only while one segment is lowered.

    `dtype` is what activations are stored in that lie on no INT8 grid. `homes`: tensors that are
    written straight into a part of a concatenation.
    """

    network: Network
    gpu: GpuTarget
    dtype: str
    views: dict[str, View] = field(default_factory=dict)
    concat_slices: dict[str, View] = field(default_factory=dict)
    allocations: dict[str, int] = field(default_factory=dict)
    work: list[TunableOp] = field(default_factory=list)
    weights: bytearray = field(default_factory=bytearray)
    schedules: Sequence[Schedule] = ()  # of matrix products, in the order of their tactics
    mma_warps: MmaWarps = no_mma_layout
    _reals: dict[str, View] = field(default_factory=dict)
    _packed: dict[bytes, int] = field(default_factory=dict)

    @property
    def item_bytes(self) -> int:
        """Bytes of one stored activation."""
        return 2 if self.dtype == "float16" else 4

    def allocate(self, base: str, dtype: str, shape: Shape, strides: Shape) -> View:
        """Take memory for a dense tensor."""
        name = base
        while name in self.allocations:
            name += "'"
        view = View(name, dtype, shape, strides)
        self.allocations[name] = view.elements * view.item_bytes
        return view

    def stored(self, dtype: str) -> str:
        """Return the type in which a tensor of the ONNX type `dtype` lies between kernels."""
        return self.dtype if is_float(dtype) else dtype

    def make(self, name: str, strides: Shape | None = None) -> View:
        """Return where the tensor `name` is to be written; it can be read from then on.

        `strides` default to the order of the indices. A tensor with a home is written there.
        """
        made = self.concat_slices[name] if name in self.concat_slices else self.fresh(name, strides)
        self.views[name] = made
        return made

    def fresh(self, name: str, strides: Shape | None = None) -> View:
        """Take memory for the tensor `name`, in the type in which it is stored."""
        shape, own = self.network.shapes[name], self.network.dtypes[name]
        strides = row_major(shape) if strides is None else strides
        scale = self.network.scales.get(name)
        if scale is not None:
            return replace(self.allocate(name, "int8", shape, strides), scale=scale)
        dtype = own if name in self.network.outputs else self.stored(own)
        return self.allocate(name, dtype, shape, strides)

    def read(self, name: str) -> View:
        """Return where a tensor or a constant lies."""
        if name in self.views:
            return self.views[name]
        if name in self.network.constants:
            values = self.network.constants[name]
            if values.dtype == object:
                raise NotCoveredError(
                    f"tensor {name!r} holds sizes of dynamic dimensions; kernels know them, but do "
                    "not compute with them as data"
                )
            self.views[name] = self.constant(values, self.stored(values.dtype.name))
            return self.views[name]
        raise NotCoveredError(f"tensor {name!r} is not in the memory of the GPU")

    def read_float(self, name: str) -> View:
        """Return where a tensor lies in the type of activations, with any strides."""
        view = self._real(name)
        if view.dtype != self.dtype:
            view = self._copied(name, view, like(view.strides, view.shape), self.dtype)
        return view

    def _real(self, name: str) -> View:
        """Return where a tensor lies, an INT8 one as real numbers if there is such a copy."""
        return self._reals[name] if name in self._reals else self.read(name)

    def _copied(self, name: str, view: View, strides: Shape, dtype: str) -> View:
        """Copy the view of a tensor for this and later readers; what lies as INT8 stays, too."""
        made = self.copy(view, strides, dtype)
        if self.read(name).scale is not None and made.scale is None:
            self._reals[name] = made
        else:
            self.views[name] = made
        return made

    def operand(self, name: str) -> View:
        """Return where a tensor lies for a reader of INT8: on a grid, or in activations' type."""
        view = self.read(name)
        return view if view.scale is not None else self.read_float(name)

    def constant(self, values: Array, dtype: str) -> View:
        """Pack constant values as `dtype`, in the order of their indices; equal ones once.

        Raises NotCoveredError: a number that `dtype` does not hold.
        """
        if dtype not in ELEMENT_TYPES:
            raise NotCoveredError(
                f"a constant of type {values.dtype} is read by a kernel; kernels read "
                f"{', '.join(ELEMENT_TYPES)}"
            )
        with np.errstate(over="ignore"):
            data = np.ascontiguousarray(values, dtype=dtype)
        if data.dtype.kind == "f" and not np.isfinite(data).all() and np.isfinite(values).all():
            raise NotCoveredError(
                f"a weight of size {float(np.abs(values).max()):.3g} does not fit {dtype}; build "
                "with --precision fp32"
            )
        raw = data.tobytes()
        if raw not in self._packed:
            self.weights += bytes(-len(self.weights) % ALIGNMENT)
            self._packed[raw] = len(self.weights)
            self.weights += raw
        offset = self._packed[raw] // data.itemsize
        return View(WEIGHTS, dtype, values.shape, row_major(values.shape), offset)

    def pixels(self, name: str) -> tuple[View, int]:
        """Return a (N, C, H, W) tensor stored channels-last, and its pitch; copies if needed."""
        return self._pixels(name, self._real(name), self.dtype)

    def stored_pixels(self, name: str) -> tuple[View, int]:
        """Return the same for a reader of INT8: a tensor that lies as INT8 stays it."""
        view = self.read(name)
        return self._pixels(name, view, self.dtype if view.scale is None else view.dtype)

    def _pixels(self, name: str, view: View, dtype: str) -> tuple[View, int]:
        if len(view.shape) != 4:
            raise NotCoveredError(
                f"tensor {name!r} has {len(view.shape)} dimensions; kernels for pictures take 4"
            )
        pitch = view.pixel_pitch()
        if pitch is None or view.dtype != dtype:
            view = self._copied(name, view, channels_last(view.shape), dtype)
            pitch = view.shape[1]
        return view, pitch

    def rows(self, name: str) -> View:
        """Return a tensor stored in the order of its indices; copies if needed."""
        view = self._real(name)
        dtype = self.stored(view.dtype) if view.scale is None else self.dtype
        if not view.is_row_major() or view.dtype != dtype:
            view = self._copied(name, view, row_major(view.shape), dtype)
        return view

    def stored_rows(self, name: str) -> View:
        """Return the same for a reader of INT8: a tensor that lies as INT8 stays it."""
        view = self.read(name)
        if view.scale is None:
            return self.rows(name)
        if not view.is_row_major():
            view = self._copied(name, view, row_major(view.shape), view.dtype)
        return view

    def expression(
        self, root: str | None, after: Sequence[Operation], root_scale: float | None = None
    ) -> Expression:
        """Join element-wise operations into steps on what is stored, `root` with its scale."""
        constants = self.network.constants
        read = operands_of(root, after, constants)
        scales = {name: self.read(name).scale for name in read if name != root}
        if root is not None:
            scales[root] = root_scale
        dtypes = self.network.dtypes
        in_half = self.dtype == "float16" and self.gpu.has_tanh
        return expression_of(root, after, constants, scales, dtypes, in_half=in_half)

    def copy(self, view: View, strides: Shape, dtype: str) -> View:
        """Add a copy of a view with these strides and this type; an INT8 tensor's real numbers."""
        base = view.base or "constant"
        target = self.allocate(base, dtype, view.shape, strides)
        if dtype == view.dtype:
            target = replace(target, scale=view.scale)
        self.elementwise(target, [view], (), ())
        return target

    def elementwise(
        self,
        target: View,
        operands: Sequence[View],
        steps: Sequence[ExprOp],
        nodes: tuple[str, ...],
    ) -> None:
        """Add an element-wise kernel; the operands have the target's shape.

        Steps work on what is stored; without any the real numbers are copied, to the target's grid.
        """
        steps = tuple(steps) or converting(operands[0].scale, target.scale)
        order = order_of(target.shape, [v.strides for v in (target, *operands)])
        tiles = tiles_of(order)
        names = ("x0", "x1", "x2", "x3")
        given = dict(zip(names, operands, strict=False))
        tensors = {**{n: given.get(n) for n in names}, "y": target}
        if tiles is None:
            call = self._in_order(tensors, order, steps, target)
        else:
            call = self._in_tiles(tensors, tiles, steps, target)
        self.add(nodes, (call,))

    def _in_order(
        self, tensors: Mapping[str, View | None], order: Order, steps: tuple[ExprOp, ...], y: View
    ) -> KernelLaunch:
        block = self._block(y, _COMPUTED_BYTES if steps else _COPIED_BYTES)
        return self.make_launch(
            "elementwise",
            (ceil_div(y.elements, block), 1, 1),
            {**tensors, "elements": y.elements},
            {
                "SHAPE": (0, *order.shape[1:]),
                "STRIDES": order.strides[1:],
                "Y_STRIDES": order.strides[0],
                "EPILOGUE": steps,
                "BLOCK": block,
            },
            writes=(y,),
        )

    def _block(self, y: View, most_bytes: int) -> int:
        """Return the elements of a block: fewer where SMs would be idle."""
        block, least = most_bytes // y.item_bytes, _BLOCKS_OF_SM * self.gpu.sm_count
        while block > _BLOCK and opt(y.elements) < least * block:
            block //= 2
        return max(block, _BLOCK)

    def _in_tiles(
        self, tensors: Mapping[str, View | None], tiles: Tiles, steps: tuple[ExprOp, ...], y: View
    ) -> KernelLaunch:
        block_n = min(power_of_two(tiles.columns), 64)
        block_m = min(power_of_two(tiles.rows), 2 * _BLOCK // block_n)
        block_n = min(power_of_two(tiles.columns), 2 * _BLOCK // block_m)
        each = ceil_div(tiles.rows, block_m) * ceil_div(tiles.columns, block_n)
        return self.make_launch(
            "transpose_tiles",
            (prod(tiles.shape) * each, 1, 1),
            tensors,
            {
                "ROWS": tiles.rows,
                "COLUMNS": tiles.columns,
                "SHAPE": (0, *tiles.shape[1:]),
                "STRIDES": tiles.strides,
                "ROW_STRIDES": tiles.row_strides,
                "COLUMN_STRIDES": tiles.column_strides,
                "EPILOGUE": steps,
                "BLOCK_M": block_m,
                "BLOCK_N": block_n,
            },
            writes=(y,),
        )

    def add(self, nodes: tuple[str, ...], *tactics: Tactic) -> None:
        """Add what `nodes` compute, in one or several ways; the first is the best by estimate."""
        self.work.append(TunableOp(nodes, tactics))

    def make_launch(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        parameters: Mapping[str, View | int | None],
        constants: Mapping[str, Constant],
        *,
        writes: Sequence[View],
        warps: int = 4,
        stages: int = 1,
    ) -> KernelLaunch:
        """Return a call; `parameters` by name, None for those that are not there.

        A size among the constants that is not fixed becomes a parameter.
        `writes`: the parameters that the kernel writes; it reads the other tensors.
        """
        absent = {name: None for name, value in parameters.items() if value is None}
        given = {name: value for name, value in parameters.items() if value is not None}
        for name, value in constants.items():
            given |= _sizes_in(name, value)
        arguments = {name: _argument(value) for name, value in given.items()}
        signature = tuple((n, _type(given[n], arguments[n])) for n in given)
        spec = KernelSpec(
            kernel,
            signature,
            tuple(sorted({**absent, **_without_sizes(constants)}.items())),
            warps,
            stages,
            exact=any(isinstance(v, View) and v.scale is not None for v in given.values()),
        )
        written = {view.base for view in writes}
        read = {v.base for v in given.values() if isinstance(v, View)} - {WEIGHTS} - written
        return KernelLaunch(
            spec, grid, tuple(arguments.values()), tuple(sorted(read)), tuple(sorted(written))
        )


def _sizes_in(path: str, value: Constant) -> dict[str, View | int]:
    """Return the sizes in a constant that dynamic dimensions decide, by their path."""
    if isinstance(value, Size):
        return {path: value}
    found: dict[str, View | int] = {}
    for at, member in enumerate(value if isinstance(value, tuple) else ()):
        found |= _sizes_in(f"{path}.{at}", member)
    return found


def _without_sizes(constants: Mapping[str, Constant]) -> dict[str, Constant]:
    """Return constants without those that are such sizes, and with None for such members."""

    def cleared(value: Constant) -> Constant:
        if isinstance(value, tuple):
            return tuple(cleared(member) for member in value)
        return None if isinstance(value, Size) else value

    return {n: cleared(value) for n, value in constants.items() if not isinstance(value, Size)}


def _argument(value: View | int) -> Argument:
    if isinstance(value, int):
        return value
    offset = value.offset * value.item_bytes
    return InWeights(offset) if value.base == WEIGHTS else InTensor(value.base, offset)


def _type(value: View | int, argument: Argument) -> str:
    """Return Triton's type of a parameter, with ":16" where its value is a multiple of 16."""
    name = "i32" if isinstance(value, int) else ELEMENT_TYPES[value.dtype].pointer
    amount = argument if isinstance(argument, int) else argument.offset
    return f"{name}:16" if amount % 16 == 0 else name
