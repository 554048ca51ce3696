"""The state of one segment's lowering: views of tensors, allocations, weights and launches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from toolkit.gpu.emit.elementwise_launch import elementwise_launch
from toolkit.gpu.emit.weights import WeightPacker
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.dtypes import ELEMENT_TYPES, is_float
from toolkit.gpu.ir.elementwise_ops import ExprOp
from toolkit.gpu.ir.expressions import Expression, expression_of, operands_of
from toolkit.gpu.ir.launch import Tactic, TunableOp
from toolkit.gpu.ir.network import Network, Operation
from toolkit.gpu.ir.view import Shape, View, channels_last, like, row_major
from toolkit.gpu.target import GpuTarget

Numbers = Literal["stored", "float", "real", "float or integer", "int8 or float"]
Layout = Literal["any", "channels last", "row-major"]

# Whether a tensor is read in the storage type of activations; else in its own. INT8 is that with a
# scale: integers have none.
_AS_FLOAT: Mapping[Numbers, Callable[[View], bool]] = {
    "stored": lambda _: False,
    "float": lambda _: True,
    "real": lambda view: view.scale is not None,
    "float or integer": lambda view: view.scale is not None or is_float(view.dtype),
    "int8 or float": lambda view: view.scale is None,
}


@dataclass
class LoweringContext:
    """The state of the lowering of one segment: emitters read it and add to it.

    `dtype`: storage type of activations that are not INT8; `exact`: tensors that are stored in
    their own type instead, `wide`: those that it does not hold, which kernels also read so.
    `concat_slices`: tensors that are written directly into a slice of a
    Concat output. `allocations`: bytes by name.
    """

    network: Network
    gpu: GpuTarget
    dtype: str
    exact: frozenset[str] = frozenset()
    wide: frozenset[str] = frozenset()
    views: dict[str, View] = field(default_factory=dict)
    concat_slices: dict[str, View] = field(default_factory=dict)
    allocations: dict[str, int] = field(default_factory=dict)
    ops: list[TunableOp] = field(default_factory=list)
    weights: WeightPacker = field(default_factory=WeightPacker)
    _dequantized: dict[str, View] = field(default_factory=dict)

    @property
    def item_bytes(self) -> int:
        """Bytes of one stored activation."""
        return ELEMENT_TYPES[self.dtype].bytes

    def allocate(self, base: str, dtype: str, shape: Shape, strides: Shape | None = None) -> View:
        """Allocate memory for a dense tensor; `strides` default to row-major."""
        name = base
        while name in self.allocations:
            name += "'"
        view = View(name, dtype, shape, row_major(shape) if strides is None else strides)
        self.allocations[name] = view.nbytes
        return view

    def storage_dtype(self, dtype: str, name: str = "") -> str:
        """Return the type in which kernels exchange the tensor `name` of the ONNX type `dtype`."""
        keeps_type = name in self.exact or name in self.wide
        return self.dtype if is_float(dtype) and not keeps_type else dtype

    def float_type(self, *names: str) -> str:
        """Return the type in which a kernel reads these tensors as floats: the widest of theirs."""
        return self.dtype if self.wide.isdisjoint(names) else "float32"

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
        scale = self.network.scales.get(name)
        if scale is not None:
            return replace(self.allocate(name, "int8", shape, strides), scale=scale)
        stored = dtype if name in self.network.outputs else self.storage_dtype(dtype, name)
        return self.allocate(name, stored, shape, strides)

    def read(
        self,
        name: str,
        numbers: Numbers = "stored",
        layout: Layout = "any",
        floats: str | None = None,
    ) -> View:
        """Return the view of a tensor; copies where its type or its layout is another.

        `numbers`: "float" is the storage type of activations, "real" dequantizes INT8, "float or
        integer" and "int8 or float" leave integers or INT8 as they are stored. `floats`: another
        type of floats than `float_type` of this tensor alone. A copy serves later readers, too; an
        INT8 tensor also stays as it is. A constant is packed with the weights.
        """
        view = stored = self._stored(name)
        floats = floats or self.float_type(name)
        dtype = floats if _AS_FLOAT[numbers](view) else view.dtype
        if view.dtype != dtype:
            view = self._dequantized.get(name, view)
        if layout == "channels last":
            fits, strides = view.pixel_pitch() is not None, channels_last(view.shape)
        elif layout == "row-major":
            fits, strides = view.is_row_major(), row_major(view.shape)
        else:
            fits, strides = True, like(view.strides, view.shape)
        if fits and view.dtype == dtype:
            return view
        copy = self.copy_view(view, strides, dtype)
        dequantized = stored.scale is not None and copy.scale is None
        (self._dequantized if dequantized else self.views)[name] = copy
        return copy

    def read_for(self, name: str, result: str) -> View:
        """Return a tensor as stored if `result` has the same scale, else as floats."""
        same = self._stored(name).scale == self.network.scales.get(result)
        return self.read(name, "stored" if same else "float")

    def _stored(self, name: str) -> View:
        if name not in self.views:
            if name not in self.network.constants:
                raise NotCoveredError(f"tensor {name!r} is not in the memory of the GPU")
            values = self.network.constants[name]
            if values.dtype == object:
                raise NotCoveredError(
                    f"tensor {name!r} holds sizes of dynamic dimensions; kernels know them, but do "
                    "not compute with them as data"
                )
            dtype = self.storage_dtype(values.dtype.name, name)
            self.views[name] = self.weights.pack(values, dtype)
        return self.views[name]

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
        half = self.item_bytes == 2 and self.gpu.has_tanh
        return expression_of(
            root, fused, network.constants, scales, network.dtypes, half_precision=half
        )

    def copy_view(self, view: View, strides: Shape, dtype: str) -> View:
        """Add a copy of a view with new strides and type; INT8 to another type is dequantized."""
        target = self.allocate(view.base or "constant", dtype, view.shape, strides)
        if dtype == view.dtype:
            target = replace(target, scale=view.scale)
        self.add_elementwise(target, [view])
        return target

    def add_elementwise(
        self,
        target: View,
        operands: Sequence[View],
        ops: Sequence[ExprOp] = (),
        nodes: tuple[str, ...] = (),
    ) -> None:
        """Add an element-wise kernel, by default a copy, as `elementwise_launch` makes it."""
        self.add_op(nodes, (elementwise_launch(target, operands, ops, self.gpu.sm_count),))

    def add_op(self, nodes: tuple[str, ...], *tactics: Tactic) -> None:
        """Add what `nodes` compute; the first tactic is the best by estimate."""
        self.ops.append(TunableOp(nodes, tactics))
