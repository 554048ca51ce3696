"""The state of one segment's lowering: views of tensors, packed weights, ops and their launches."""

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
from toolkit.gpu.ir.expressions import Expression, expression_of, operands_of, requantize_ops
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
_MIN_BLOCK = 1024  # elements of a block of an element-wise kernel
# Bytes of a block that only copies, and of one that computes. On an H200 factors for the channels
# of INT8 took 33 us with blocks of 1024 bytes, 26 with 2048 and 4096 (51 MB); copies of FP16 took
# as long with 2 KB as with 8 (131 MB: memory bounds them).
_COPY_BLOCK_BYTES = 8192
_COMPUTE_BLOCK_BYTES = 2048
_MIN_BLOCKS_PER_SM = 4
_TILE_ELEMENTS = 2048  # of a transposing tile
_MAX_TILE_COLUMNS = 64
_OPERANDS = ("x0", "x1", "x2", "x3")  # parameters of the element-wise kernels


@dataclass
class LoweringContext:
    """The state of the lowering of one segment: emitters read it and add to it.

    `dtype`: storage type of activations that are not INT8; `exact`: tensors that are stored in
    their own type instead. `concat_slices`: tensors that are written directly into a slice of a
    Concat output.
    """

    network: Network
    gpu: GpuTarget
    dtype: str
    exact: frozenset[str] = frozenset()
    views: dict[str, View] = field(default_factory=dict)
    concat_slices: dict[str, View] = field(default_factory=dict)
    allocations: dict[str, int] = field(default_factory=dict)
    ops: list[TunableOp] = field(default_factory=list)
    weights: bytearray = field(default_factory=bytearray)
    schedules: Sequence[Schedule] = ()  # of matrix products, in the order of their tactics
    mma_warps: MmaWarps = no_mma_layout
    _dequantized: dict[str, View] = field(default_factory=dict)
    _packed: dict[bytes, int] = field(default_factory=dict)

    @property
    def item_bytes(self) -> int:
        """Bytes of one stored activation."""
        return 2 if self.dtype == "float16" else 4

    def allocate(self, base: str, dtype: str, shape: Shape, strides: Shape) -> View:
        """Allocate memory for a dense tensor."""
        name = base
        while name in self.allocations:
            name += "'"
        view = View(name, dtype, shape, strides)
        self.allocations[name] = view.elements * view.item_bytes
        return view

    def storage_dtype(self, dtype: str, name: str = "") -> str:
        """Return the type in which kernels exchange the tensor `name` of the ONNX type `dtype`."""
        return self.dtype if is_float(dtype) and name not in self.exact else dtype

    def output_view(self, name: str, strides: Shape | None = None) -> View:
        """Return the view that an emitter writes the tensor `name` to: a Concat slice, or new.

        `strides` default to row-major; a Concat slice keeps its own.
        """
        view = self.concat_slices.get(name) or self.allocate_tensor(name, strides)
        self.views[name] = view
        return view

    def output_like(self, name: str, source: View) -> View:
        """Return `output_view` with the layout of `source`; segment outputs are row-major."""
        is_output = name in self.network.outputs
        strides = None if is_output else like(source.strides, self.network.shapes[name])
        return self.output_view(name, strides)

    def allocate_tensor(self, name: str, strides: Shape | None = None) -> View:
        """Allocate memory for the tensor `name` in its storage type; INT8 where it has a scale."""
        shape, dtype = self.network.shapes[name], self.network.dtypes[name]
        strides = row_major(shape) if strides is None else strides
        scale = self.network.scales.get(name)
        if scale is not None:
            return replace(self.allocate(name, "int8", shape, strides), scale=scale)
        stored = dtype if name in self.network.outputs else self.storage_dtype(dtype, name)
        return self.allocate(name, stored, shape, strides)

    def read(self, name: str) -> View:
        """Return the view of a tensor; a constant is packed with the weights."""
        if name in self.views:
            return self.views[name]
        if name in self.network.constants:
            values = self.network.constants[name]
            if values.dtype == object:
                raise NotCoveredError(
                    f"tensor {name!r} holds sizes of dynamic dimensions; kernels know them, but do "
                    "not compute with them as data"
                )
            dtype = self.storage_dtype(values.dtype.name, name)
            self.views[name] = self.pack_constant(values, dtype)
            return self.views[name]
        raise NotCoveredError(f"tensor {name!r} is not in the memory of the GPU")

    def read_float(self, name: str) -> View:
        """Return a tensor in the storage type of activations, with any strides."""
        view = self._dequantized_view(name)
        if view.dtype != self.dtype:
            view = self._copy_tensor(name, view, like(view.strides, view.shape), self.dtype)
        return view

    def read_dequantized(self, name: str) -> View:
        """Return an INT8 tensor as `read_float` does, any other as it is stored."""
        view = self.read(name)
        return view if view.scale is None else self.read_float(name)

    def read_float_or_integer(self, name: str) -> View:
        """Return floats and INT8 tensors as `read_float` does, integers as they are stored."""
        view = self.read(name)
        floats = view.scale is not None or is_float(view.dtype)
        return self.read_float(name) if floats else view

    def read_for(self, name: str, result: str) -> View:
        """Return a tensor as stored if `result` has the same scale, else as `read_float` does."""
        view = self.read(name)
        return view if view.scale == self.network.scales.get(result) else self.read_float(name)

    def read_int8_or_float(self, name: str) -> View:
        """Return an INT8 tensor as it is stored, any other as `read_float` does."""
        view = self.read(name)
        return view if view.scale is not None else self.read_float(name)

    def read_nhwc(self, name: str, *, keep_int8: bool = False) -> tuple[View, int]:
        """Return a (N, C, ...) tensor stored channels-last, and its pixel pitch in elements.

        An INT8 tensor is dequantized unless `keep_int8`. Anything else is copied where needed.
        """
        view = self.read(name) if keep_int8 else self._dequantized_view(name)
        dtype = view.dtype if keep_int8 and view.scale is not None else self.dtype
        pitch = view.pixel_pitch()
        if pitch is None or view.dtype != dtype:
            view = self._copy_tensor(name, view, channels_last(view.shape), dtype)
            pitch = view.shape[1]
        return view, pitch

    def read_row_major(self, name: str) -> View:
        """Return a tensor stored row-major, dequantized; copies where needed."""
        view = self._dequantized_view(name)
        dtype = self.storage_dtype(view.dtype) if view.scale is None else self.dtype
        if not view.is_row_major() or view.dtype != dtype:
            view = self._copy_tensor(name, view, row_major(view.shape), dtype)
        return view

    def _dequantized_view(self, name: str) -> View:
        """Return the dequantized copy of a tensor if there is one, else its view."""
        return self._dequantized[name] if name in self._dequantized else self.read(name)

    def _copy_tensor(self, name: str, view: View, strides: Shape, dtype: str) -> View:
        """Copy a tensor for this and later readers; an INT8 tensor also stays as it is."""
        copy = self.copy_view(view, strides, dtype)
        if self.read(name).scale is not None and copy.scale is None:
            self._dequantized[name] = copy
        else:
            self.views[name] = copy
        return copy

    def pack_constant(self, values: Array, dtype: str) -> View:
        """Pack constant values with the weights as `dtype`, row-major; equal ones once.

        Raises NotCoveredError: `dtype` is unknown, or a value overflows it.
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

    def expression(
        self, root: str | None, fused: Sequence[Operation], root_scale: float | None = None
    ) -> Expression:
        """Fuse element-wise operations into one expression on stored values.

        `root`: the first operand, computed by the kernel; `root_scale` where it is INT8.
        """
        network = self.network
        scales = {
            name: root_scale if name == root else self.read(name).scale
            for name in operands_of(root, fused, network.constants)
        }
        half = self.dtype == "float16" and self.gpu.has_tanh
        return expression_of(
            root, fused, network.constants, scales, network.dtypes, half_precision=half
        )

    def copy_view(self, view: View, strides: Shape, dtype: str) -> View:
        """Add a copy of a view with new strides and type; INT8 to another type is dequantized."""
        target = self.allocate(view.base or "constant", dtype, view.shape, strides)
        if dtype == view.dtype:
            target = replace(target, scale=view.scale)
        self.add_elementwise(target, [view], (), ())
        return target

    def add_elementwise(
        self,
        target: View,
        operands: Sequence[View],
        ops: Sequence[ExprOp],
        nodes: tuple[str, ...],
    ) -> None:
        """Add an element-wise kernel; the operands have the target's shape.

        `ops` work on stored values; without any the first operand is copied and requantized.
        """
        ops = tuple(ops) or requantize_ops(operands[0].scale, target.scale)
        order = order_of(target.shape, [v.strides for v in (target, *operands)])
        tiles = tiles_of(order)
        present = dict(zip(_OPERANDS, operands, strict=False))
        tensors = {**{name: present.get(name) for name in _OPERANDS}, "y": target}
        if tiles is None:
            launch = self._launch_elementwise(tensors, order, ops, target)
        else:
            launch = self._launch_transpose_tiles(tensors, tiles, ops, target)
        self.add_op(nodes, (launch,))

    def _launch_elementwise(
        self, tensors: Mapping[str, View | None], order: Order, ops: tuple[ExprOp, ...], y: View
    ) -> KernelLaunch:
        block = self._elementwise_block(y, _COMPUTE_BLOCK_BYTES if ops else _COPY_BLOCK_BYTES)
        return self.make_launch(
            "elementwise",
            (ceil_div(y.elements, block), 1, 1),
            {**tensors, "elements": y.elements},
            {
                "SHAPE": (0, *order.shape[1:]),
                "STRIDES": order.strides[1:],
                "Y_STRIDES": order.strides[0],
                "EXPRESSION": ops,
                "BLOCK": block,
            },
            writes=(y,),
        )

    def _elementwise_block(self, y: View, max_bytes: int) -> int:
        """Return the elements of a block: fewer where SMs would be idle."""
        block, min_blocks = max_bytes // y.item_bytes, _MIN_BLOCKS_PER_SM * self.gpu.sm_count
        while block > _MIN_BLOCK and opt(y.elements) < min_blocks * block:
            block //= 2
        return max(block, _MIN_BLOCK)

    def _launch_transpose_tiles(
        self, tensors: Mapping[str, View | None], tiles: Tiles, ops: tuple[ExprOp, ...], y: View
    ) -> KernelLaunch:
        rows, columns = power_of_two(tiles.rows), power_of_two(tiles.columns)
        block_m = min(rows, _TILE_ELEMENTS // min(columns, _MAX_TILE_COLUMNS))
        block_n = min(columns, _TILE_ELEMENTS // block_m)
        tiles_per_matrix = ceil_div(tiles.rows, block_m) * ceil_div(tiles.columns, block_n)
        return self.make_launch(
            "transpose_tiles",
            (prod(tiles.shape) * tiles_per_matrix, 1, 1),
            tensors,
            {
                "ROWS": tiles.rows,
                "COLUMNS": tiles.columns,
                "SHAPE": (0, *tiles.shape[1:]),
                "STRIDES": tiles.strides,
                "ROW_STRIDES": tiles.row_strides,
                "COLUMN_STRIDES": tiles.column_strides,
                "EXPRESSION": ops,
                "BLOCK_M": block_m,
                "BLOCK_N": block_n,
            },
            writes=(y,),
        )

    def add_op(self, nodes: tuple[str, ...], *tactics: Tactic) -> None:
        """Add what `nodes` compute; the first tactic is the best by estimate."""
        self.ops.append(TunableOp(nodes, tactics))

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
        """Return a kernel launch.

        `parameters` by name, None for absent tensors. A dynamic size in a constant becomes a
        run-time parameter. `writes`: the tensors that the kernel writes; it reads the others.
        """
        absent = {name: None for name, value in parameters.items() if value is None}
        present = {name: value for name, value in parameters.items() if value is not None}
        for name, value in constants.items():
            present |= _dynamic_sizes(name, value)
        arguments = {name: _argument(value) for name, value in present.items()}
        signature = tuple((n, _triton_type(present[n], arguments[n])) for n in present)
        spec = KernelSpec(
            kernel,
            signature,
            tuple(sorted({**absent, **_fixed_constants(constants)}.items())),
            warps,
            stages,
            exact=any(isinstance(v, View) and v.scale is not None for v in present.values()),
        )
        written = {view.base for view in writes}
        read = {v.base for v in present.values() if isinstance(v, View)} - {WEIGHTS} - written
        return KernelLaunch(
            spec, grid, tuple(arguments.values()), tuple(sorted(read)), tuple(sorted(written))
        )


def _dynamic_sizes(path: str, value: Constant) -> dict[str, View | int]:
    """Return the dynamic sizes in a constant by their path, such as "SHAPE.1"."""
    if isinstance(value, Size):
        return {path: value}
    sizes: dict[str, View | int] = {}
    for at, member in enumerate(value if isinstance(value, tuple) else ()):
        sizes |= _dynamic_sizes(f"{path}.{at}", member)
    return sizes


def _fixed_constants(constants: Mapping[str, Constant]) -> dict[str, Constant]:
    """Return the constants without dynamic sizes; None stands for such members of tuples."""

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


def _triton_type(value: View | int, argument: Argument) -> str:
    """Return Triton's type of a parameter, with ":16" where its value is a multiple of 16."""
    name = "i32" if isinstance(value, int) else ELEMENT_TYPES[value.dtype].pointer
    aligned = argument if isinstance(argument, int) else argument.offset
    return f"{name}:16" if aligned % 16 == 0 else name
