"""A network in the making: operations that are added one by one, with new tensors and constants."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from toolkit.gpu.ir.network import Array, Attribute, IntegerConstant, Network, Operation, Shape


class Rewriting:
    """Starts with the tensors and constants of `network` and none of its operations.

    Tensors that no operation makes any more stay known; nothing comes of them.
    """

    def __init__(self, network: Network) -> None:
        self._old = network
        self.operations: list[Operation] = []
        self.shapes: dict[str, Shape] = dict(network.shapes)
        self.dtypes: dict[str, str] = dict(network.dtypes)
        self.constants: dict[str, Array] = dict(network.constants)
        self.integers: dict[str, IntegerConstant] = dict(network.integers)
        self.scales: dict[str, float] = dict(network.scales)

    def network(self) -> Network:
        """Return what was made."""
        return replace(
            self._old,
            operations=tuple(self.operations),
            shapes=self.shapes,
            dtypes=self.dtypes,
            constants=self.constants,
            integers=self.integers,
            scales=self.scales,
        )

    def tensor(self, wished: str, shape: Shape, dtype: str, scale: float | None = None) -> str:
        """Add a tensor under a free name like `wished`; return the name."""
        name = self._free(wished)
        self.shapes[name] = shape
        self.dtypes[name] = dtype
        if scale is not None:
            self.scales[name] = scale
        return name

    def constant(self, wished: str, values: Array) -> str:
        """Add a constant under a free name like `wished`; return the name."""
        name = self._free(wished)
        self.constants[name] = values
        return name

    def to_constant(self, name: str, values: Array) -> None:
        """Make a constant of a tensor that an operation would have made."""
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

    def _free(self, wished: str) -> str:
        name = wished
        while name in self.shapes or name in self.constants:
            name += "'"
        return name
