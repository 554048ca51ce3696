"""A network under construction: operations that are added one by one, new tensors and constants."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from toolkit.gpu.ir.network import Array, Attribute, IntegerConstant, Network, Operation, Shape
from toolkit.graph.rewriter import UniqueNames


class NetworkBuilder:
    """Starts with the tensors and constants of `network` and none of its operations.

    Tensors that no operation computes any more stay in the tables, unused.
    """

    def __init__(self, network: Network) -> None:
        self.operations: list[Operation] = []
        self.shapes: dict[str, Shape] = dict(network.shapes)
        self.dtypes: dict[str, str] = dict(network.dtypes)
        self.constants: dict[str, Array] = dict(network.constants)
        self.integers: dict[str, IntegerConstant] = dict(network.integers)
        self.scales: dict[str, float] = dict(network.scales)
        self._network = network
        self._names = UniqueNames((*network.shapes, *network.constants))

    def network(self) -> Network:
        """Return the network with the operations added so far."""
        return replace(
            self._network,
            operations=tuple(self.operations),
            shapes=self.shapes,
            dtypes=self.dtypes,
            constants=self.constants,
            integers=self.integers,
            scales=self.scales,
        )

    def tensor(self, preferred: str, shape: Shape, dtype: str, scale: float | None = None) -> str:
        """Add a tensor under a free name like `preferred`; return the name."""
        name = self._names.take(preferred)
        self.shapes[name] = shape
        self.dtypes[name] = dtype
        if scale is not None:
            self.scales[name] = scale
        return name

    def constant(self, preferred: str, values: Array) -> str:
        """Add a constant under a free name like `preferred`; return the name."""
        name = self._names.take(preferred)
        self.constants[name] = values
        return name

    def repacked(self, name: str, pack: Callable[[Array], Array], axis: int | None = None) -> str:
        """Add a constant in another order: real numbers, and the integers that they were.

        `axis`: the new one of scales that lie along one; None: it stays.
        """
        new = self.constant(f"{name} (packed)", pack(self.constants[name]))
        integers = self.integers.get(name)
        if integers is not None:
            moved = integers.axis if None in (integers.axis, axis) else axis
            self.integers[new] = IntegerConstant(pack(integers.values), integers.scale, moved)
        return new

    def to_constant(self, name: str, values: Array) -> None:
        """Turn a tensor that an operation would compute into a constant."""
        del self.shapes[name], self.dtypes[name]
        self.constants[name] = values

    def add(
        self,
        source: Operation,
        kind: str,
        inputs: Sequence[str],
        output: str,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> str:
        """Add an operation that does (a part of) what the node `source` does; return `output`."""
        operation = Operation(kind, source.name, tuple(inputs), (output,), attributes or {})
        self.operations.append(operation)
        return output

    def add_new(
        self,
        source: Operation,
        kind: str,
        inputs: Sequence[str],
        shape: Shape,
        dtype: str,
        *,
        attributes: Mapping[str, Attribute] | None = None,
        scale: float | None = None,
    ) -> str:
        """Add an operation that makes a new tensor; return the tensor's name."""
        output = self.tensor(f"{source.outputs[0]} ({kind})", shape, dtype, scale)
        return self.add(source, kind, inputs, output, attributes)

    def add_again(self, op: Operation, source: str) -> str:
        """Add an operation of one operand for another operand; return its result."""
        (old,) = op.outputs
        shape, dtype, scale = self.shapes[source], self.dtypes[old], self.scales.get(old)
        return self.add_new(
            op, op.kind, (source,), shape, dtype, attributes=op.attributes, scale=scale
        )

    def shape_of(self, name: str) -> Shape:
        """Return the shape of a tensor or a constant."""
        return self.constants[name].shape if name in self.constants else self.shapes[name]
