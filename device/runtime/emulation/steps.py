"""The steps of an emulated segment, and what is known of each tensor while they are made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.errors import SessionError
from device.runtime.dla import layers
from device.runtime.dla.layers import Arithmetic, Path, Sums
from device.runtime.emulation import float_ops
from device.runtime.emulation.forms import Ending, Form, Grid, Integers, Real, scale_of
from device.runtime.emulation.options import Mode
from device.runtime.emulation.segment_graph import Graph, Node

Array = NDArray[Any]
Function = Callable[[Sequence[Array]], Array]


@dataclass(frozen=True, slots=True)
class Step:
    """One layer: reads buffers, writes one. `scale` is that of an INT8 result, else None.

    `tensor` is the ONNX tensor whose numbers the buffer holds, `node` the node that it starts with.
    """

    node: str
    op: str
    tensor: str
    inputs: tuple[str, ...]
    output: str
    scale: float | None
    run: Function


@dataclass(frozen=True, slots=True)
class Lowered:
    """A segment's steps in order, where its outputs lie, and the zero points of what is stored."""

    steps: tuple[Step, ...]
    outputs: Mapping[str, Form]
    zero_points: Mapping[str, int]


class Lowering:
    """Turns one graph into steps, node by node."""

    def __init__(self, graph: Graph, where: str, mode: Mode, arithmetic: Arithmetic) -> None:
        """Start with nothing lowered; `where` names the segment in refusals."""
        self.graph = graph
        self.integers: dict[str, Integers] = {}
        self._where = where
        self._mode = mode
        self.arithmetic = arithmetic
        self._steps: list[Step] = []
        self._forms: dict[str, Form] = {}
        self._stored: dict[str, Grid] = {}
        self._zeros: dict[str, int] = {}
        self._absorbed: set[int] = set()

    def lowered(self) -> Lowered:
        """Return what was added."""
        outputs: dict[str, Form] = {}
        for name in self.graph.outputs:
            outputs[name] = self._stored[name] if name in self._stored else self._forms[name]
        return Lowered(tuple(self._steps), outputs, self._zeros)

    def taken_in(self, node: Node) -> bool:
        """Whether a layer before this node has taken it in."""
        return id(node) in self._absorbed

    def refusal(self, node: Node, why: str) -> SessionError:
        """Return the error that refuses a node."""
        return SessionError(
            f"{self._where}: node {node.name!r} ({node.op}) cannot be emulated: {why}; "
            "run it with the portable implementation"
        )

    def form(self, name: str) -> Form:
        """Return how a tensor lives; an input of the segment that no DQ reads is a real one."""
        return self._forms.setdefault(name, Real(name))

    def constant(self, name: str) -> Array | None:
        """Return a constant in floating point, whether stored so or in integers."""
        found = self.integers.get(name)
        return self.graph.constants.get(name) if found is None else found.real()

    def grids(self, node: Node) -> list[Grid] | None:
        """Return the forms of all inputs if they are INT8, else None."""
        forms = [None if self.constant(one) is not None else self.form(one) for one in node.inputs]
        found = [form for form in forms if isinstance(form, Grid)]
        return found if len(found) == len(forms) else None

    def path(self, sums: Sums, ending: Ending, largest_sum: int) -> Path:
        """Return the output stages of a layer, on the fast route where that is asked and exact."""
        path = layers.make_path(sums, ending.activation, ending.scale, self.arithmetic)
        fast = layers.fast_path(path, largest_sum) if self._mode == "fast" else None
        return path if fast is None else fast

    def end(self, node: Node, inputs: tuple[str, ...], ending: Ending, run: Function) -> None:
        """Add a layer that an ending rounds; the nodes it takes in need no step of their own."""
        self._add(node, inputs, ending.tensor, Grid(ending.tensor, ending.scale), run)
        for reader in ending.absorbed:
            self._absorbed.add(id(reader))
            if reader.op == "QuantizeLinear":
                self._zeros[reader.outputs[0]] = self.zero(reader)
        for stored in ending.stored:
            self._stored[stored] = Grid(ending.tensor, ending.scale)

    def keep(self, node: Node, inputs: tuple[str, ...], scale: float | None, run: Function) -> None:
        """Add a step that keeps its inputs' grid: of a scale, or (None) in floating point."""
        name = node.outputs[0]
        form = Real(name) if scale is None else Grid(name, scale)
        self._add(node, inputs, name, form, run)

    def real(self, node: Node, inputs: tuple[str, ...], run: Function) -> None:
        """Add a step in floating point, its result as FP16 holds it."""
        name = node.outputs[0]
        half = float_ops.to_half
        self._add(node, inputs, name, Real(name), lambda arrays: half(run(arrays)))

    def real_input(self, node: Node, name: str) -> str:
        """Return a buffer with a tensor's numbers in float32, adding what makes them so."""
        constant = self.constant(name)
        form = self.form(name)
        if constant is None and isinstance(form, Real):
            return form.buffer
        buffer = f"{name} in float32"
        if all(step.output != buffer for step in self._steps):
            inputs: tuple[str, ...] = ()
            if constant is not None:
                run = _constant(constant.astype(np.float32))
            else:
                assert isinstance(form, Grid)
                run, inputs = _restorer(form.scale), (form.buffer,)
            self._steps.append(Step(node.name, "Cast", name, inputs, buffer, None, run))
        return buffer

    def stored_as(self, node: Node, name: str, grid: Grid) -> None:
        """Note what a Q node made, or that it only names what there is."""
        self._zeros[name] = self.zero(node)
        self._stored[name] = grid

    def restored(self, node: Node, scale: float) -> None:
        """A DQ of something stored, or of an INT8 input of the segment."""
        source, zero = node.inputs[0], self.zero(node)
        if zero != self._zeros.get(source, 0):
            raise self.refusal(node, f"its zero point is {zero}, that of its input is not")
        buffer = self._stored[source].buffer if source in self._stored else source
        self._forms[node.outputs[0]] = Grid(buffer, scale)

    def scale(self, node: Node) -> float:
        """Return the one scale of a Q or DQ."""
        found = scale_of(node, self.graph.constants)
        if found is None:
            raise self.refusal(node, "the DLA has one scale for a tensor, and a constant one")
        return found

    def zero(self, node: Node) -> int:
        """Return the zero point of a Q or DQ; UINT8 with 128 is the same grid as INT8 with 0."""
        name = node.inputs[2] if len(node.inputs) > 2 else ""
        if not name and node.op == "QuantizeLinear":
            raise self.refusal(node, "without a zero point it makes UINT8 from 0 on")
        point = self.graph.constants.get(name, np.zeros((), np.uint8))
        zero = int(point.reshape(-1)[0])
        if zero != (128 if name and point.dtype == np.uint8 else 0):
            raise self.refusal(node, f"zero point {zero}; the DLA's grid is symmetric about 0")
        return zero

    def _add(
        self, node: Node, inputs: tuple[str, ...], name: str, form: Form, run: Function
    ) -> None:
        scale = form.scale if isinstance(form, Grid) else None
        self._steps.append(Step(node.name, node.op, name, inputs, form.buffer, scale, run))
        self._forms[name] = form


def _restorer(scale: float) -> Function:
    return lambda arrays: arrays[0].astype(np.float32) * np.float32(scale)


def _constant(array: Array) -> Function:
    return lambda _: array
