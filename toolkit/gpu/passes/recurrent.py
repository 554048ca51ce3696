"""RNN, GRU and LSTM -> products and element-wise work, step by step.

The inputs of all steps go through one product. A step is then one product of the state (two for a
GRU that resets before it) and an expression or two, and no tensor is moved between steps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.gpu.ir.network import Array, Attribute, Operation, Shape
from toolkit.gpu.ir.patterns import Match, NetworkRewriter, UseDefGraph

# By operator: gates in the order of ONNX's weights, and the default activations.
_GATES: Mapping[str, str] = {"RNN": "h", "GRU": "zrh", "LSTM": "iofc"}
_DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "RNN": ("Tanh",),
    "GRU": ("Sigmoid", "Tanh"),
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
}
ACTIVATIONS = ("Sigmoid", "Tanh", "Relu")


@dataclass(frozen=True, slots=True)
class _Cell:
    """One direction: constant weights with a column for each gate and number of the state.

    `peepholes`: of the gates i, o, f, or none; `reset_first`: a GRU resets the state before the
    product, else the product with `recurrence_bias`.
    """

    recurrence: Array
    recurrence_bias: Array | None
    peepholes: tuple[Array, ...]
    activations: tuple[str, ...]
    reset_first: bool


@dataclass(frozen=True, slots=True)
class _State:
    """The names of h and, in an LSTM, c, each (batch, hidden); "" where they are 0."""

    h: str
    c: str


@dataclass(frozen=True, slots=True)
class _Adder:
    """Adds operations in the name of the one that they replace."""

    rewriter: NetworkRewriter
    op: Operation

    def add(
        self,
        kind: str,
        inputs: Sequence[str],
        shape: Shape,
        attributes: Mapping[str, Attribute] | None = None,
        output: str = "",
    ) -> str:
        dtype = self.rewriter.dtypes[self.op.inputs[0]]
        name = output or self.rewriter.tensor(f"{self.op.name} ({kind})", shape, dtype)
        return self.rewriter.add(self.op, kind, inputs, name, attributes)

    def constant(self, values: Array) -> str:
        dtype = self.rewriter.dtypes[self.op.inputs[0]]
        return self.rewriter.constant(f"{self.op.name} (constant)", np.asarray(values, dtype))

    def split(self, name: str, count: int, axis: int) -> list[str]:
        """Add the equal parts of a tensor along a dimension."""
        shape = list(self.rewriter.shapes[name])
        shape[axis] //= count
        sizes = self.rewriter.constant(
            f"{self.op.name} (sizes)", np.full(count, shape[axis], np.int64)
        )
        dtype = self.rewriter.dtypes[name]
        parts = [self.rewriter.tensor(f"{name} (part)", tuple(shape), dtype) for _ in range(count)]
        self.rewriter.operations.append(
            Operation("Split", self.op.name, (name, sizes), tuple(parts), {"axis": axis})
        )
        return parts

    def shaped(self, name: str, shape: Shape) -> str:
        return self.add("Reshape", (name,), shape)

    def joined(self, names: Sequence[str], axis: int, output: str = "") -> str:
        shape = list(self.rewriter.shapes[names[0]])
        shape[axis] *= len(names)
        return self.add("Concat", names, tuple(shape), {"axis": axis}, output)

    def activated(self, kind: str, name: str) -> str:
        return self.add(kind, (name,), self.rewriter.shapes[name])

    def both(self, kind: str, first: str, second: str) -> str:
        """Add an operation of two tensors; the first has the shape of the result."""
        return self.add(kind, (first, second), self.rewriter.shapes[first])

    def times(self, first: str, second: str) -> str:
        return self.both("Mul", first, second)

    def plus(self, first: str, second: str) -> str:
        """Add a sum; "" is 0."""
        return self.both("Add", first, second) if first and second else first or second


def recurrence_in_steps(_: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Write an RNN, GRU or LSTM as its steps."""
    _add_steps(_Adder(rewriter, op), op)
    return rewriter.replacement()


def _add_steps(add: _Adder, op: Operation) -> None:
    rewriter, x, last_dim = add.rewriter, op.inputs[0], op.integer("layout", 0) == 1
    if last_dim:
        batch, steps, width = rewriter.shapes[x]
        x = add.add("Transpose", (x,), (steps, batch, width), {"perm": (1, 0, 2)})
    directions = rewriter.constants[op.inputs[1]].shape[0]
    backward = (op.text("direction", "forward") == "reverse", True)[:directions]
    runs = [list(_run(add, op, x, at)) for at in range(directions)]
    in_time = [run[::-1] if back else run for run, back in zip(runs, backward, strict=True)]
    y, *ends = (*op.outputs, "", "", "")[:3]
    if y:
        batch, hidden = rewriter.shapes[runs[0][0].h]
        rows = [
            add.joined([add.shaped(state.h, (1, 1, batch, hidden)) for state in states], 1)
            for states in zip(*in_time, strict=True)
        ]
        whole = add.joined(rows, 0, "" if last_dim else y)
        if last_dim:
            add.add("Transpose", (whole,), rewriter.shapes[y], {"perm": (2, 0, 1, 3)}, y)
    for output, states in zip(
        ends, ([r[-1].h for r in runs], [r[-1].c for r in runs]), strict=True
    ):
        if output:
            batch, hidden = rewriter.shapes[states[0]]
            axis, shape = (1, (batch, 1, hidden)) if last_dim else (0, (1, batch, hidden))
            add.joined([add.shaped(name, shape) for name in states], axis, output)


def _run(add: _Adder, op: Operation, x: str, at: int) -> Iterator[_State]:
    """Add the steps of direction number `at` in the order in which they run."""
    rewriter = add.rewriter
    steps, batch, _ = rewriter.shapes[x]
    cell, bias = _read_cell(add, op, at)
    weights = rewriter.constants[op.inputs[1]][at].T
    operands = (x, add.constant(weights), *([] if bias is None else [add.constant(bias)]))
    sums = add.add("MatMul", operands, (steps, batch, weights.shape[1]))
    parts = [add.shaped(part, (batch, weights.shape[1])) for part in add.split(sums, steps, 0)]
    state = _State(_initial(add, op, 5, at), _initial(add, op, 6, at))
    reverse = at == 1 or op.text("direction", "forward") == "reverse"
    for part in reversed(parts) if reverse else parts:
        state = _STEPS[op.kind](add, cell, part, state)
        yield state


def _read_cell(add: _Adder, op: Operation, at: int) -> tuple[_Cell, Array | None]:
    """Return the cell of a direction, and the bias that goes with the inputs."""
    constants = add.rewriter.constants
    recurrence = constants[op.inputs[2]][at].T
    hidden, gates = recurrence.shape[0], len(_GATES[op.kind])
    first = op.kind != "GRU" or op.integer("linear_before_reset", 0) == 0
    bias, recurrent_bias = None, None
    if op.input(3):
        bias, recurrent_bias = np.split(constants[op.inputs[3]][at], 2)
        from_recurrence = np.zeros(gates * hidden, bool)
        from_recurrence[
            (0 if first else 2 * hidden) :
        ] = not first  # a GRU resets the product with its bias
        bias, recurrent_bias = (
            bias + np.where(from_recurrence, 0, recurrent_bias),
            np.where(from_recurrence, recurrent_bias, 0),
        )
    names = op.text("activations", ",".join(_DEFAULTS[op.kind] * (at + 1))).split(",")
    count = len(_DEFAULTS[op.kind])
    activations = tuple(names[at * count : (at + 1) * count])
    holes = np.split(constants[op.inputs[7]][at], 3) if op.input(7) else ()
    return _Cell(
        recurrence, None if first else recurrent_bias, tuple(holes), activations, first
    ), bias


def _initial(add: _Adder, op: Operation, operand: int, at: int) -> str:
    """Return the state that a direction starts with, "" for 0."""
    name = op.input(operand)
    if not name:
        return ""
    rewriter, axis = add.rewriter, 1 if op.integer("layout", 0) else 0
    if name in rewriter.constants:
        return add.constant(np.take(rewriter.constants[name], at, axis))
    shape = rewriter.shapes[name]
    part = add.split(name, shape[axis], axis)[at]
    return add.shaped(part, (*shape[:axis], *shape[axis + 1 :]))


def _with_state(add: _Adder, part: str, h: str, recurrence: Array) -> str:
    """Add part + h recurrence."""
    if not h:
        return part
    product = add.add("MatMul", (h, add.constant(recurrence)), add.rewriter.shapes[part])
    return add.plus(product, part)


def _rnn_step(add: _Adder, cell: _Cell, part: str, state: _State) -> _State:
    total = _with_state(add, part, state.h, cell.recurrence)
    return _State(add.activated(cell.activations[0], total), "")


def _gru_step(add: _Adder, cell: _Cell, part: str, state: _State) -> _State:
    """h' = (1 - z) n + z h, with the update z, the reset r and the new numbers n."""
    hidden = cell.recurrence.shape[0]
    gates, last = np.split(cell.recurrence, [2 * hidden], axis=1)
    x_z, x_r, x_n = add.split(part, 3, 1)
    if state.h:
        both = add.add(
            "MatMul", (state.h, add.constant(gates)), (add.rewriter.shapes[x_z][0], 2 * hidden)
        )
        h_z, h_r = add.split(both, 2, 1)
        x_z, x_r = add.plus(x_z, h_z), add.plus(x_r, h_r)
    z, r = (add.activated(cell.activations[0], name) for name in (x_z, x_r))
    shape = add.rewriter.shapes[x_n]
    if cell.reset_first and state.h:
        reset = add.times(r, state.h)
        x_n = add.plus(add.add("MatMul", (reset, add.constant(last)), shape), x_n)
    elif not cell.reset_first:
        bias = (
            "" if cell.recurrence_bias is None else add.constant(cell.recurrence_bias[2 * hidden :])
        )
        if state.h:
            inside = add.add("MatMul", (state.h, add.constant(last)), shape)
            x_n = add.plus(add.times(r, add.plus(inside, bias)), x_n)
        elif bias:
            x_n = add.plus(add.times(r, bias), x_n)
    new = add.activated(cell.activations[1], x_n)
    update = add.times(new, add.add("Sub", (add.constant(np.ones(())), z), shape))
    return _State(add.plus(update, add.times(z, state.h) if state.h else ""), "")


def _lstm_step(add: _Adder, cell: _Cell, part: str, state: _State) -> _State:
    """c' = f c + i n and h' = o g(c'), with the gates i, o, f and the new numbers n."""
    total = _with_state(add, part, state.h, cell.recurrence)
    i, o, f, n = add.split(total, 4, 1)
    squash, narrow, end = cell.activations
    if cell.peepholes and state.c:
        i, f = (
            add.plus(gate, add.times(state.c, add.constant(hole)))
            for gate, hole in ((i, cell.peepholes[0]), (f, cell.peepholes[2]))
        )
    c = add.times(add.activated(squash, i), add.activated(narrow, n))
    if state.c:
        c = add.plus(add.times(add.activated(squash, f), state.c), c)
    if cell.peepholes:
        o = add.plus(o, add.times(c, add.constant(cell.peepholes[1])))
    h = add.times(add.activated(squash, o), add.activated(end, c))
    return _State(h, c)


_STEPS: Mapping[str, Callable[[_Adder, _Cell, str, _State], _State]] = {
    "RNN": _rnn_step,
    "GRU": _gru_step,
    "LSTM": _lstm_step,
}
