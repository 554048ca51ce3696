"""Rules of `toolkit.gpu.ir.patterns` that simplify work with constants.

Exporters of windowed attention add the bias of positions and the mask of windows one after the
other, between reshapes; as one constant both join the kernel of attention.
"""

import math

import numpy as np

from toolkit.gpu.ir.network import Operation
from toolkit.gpu.ir.patterns import Surroundings
from toolkit.gpu.ir.rewriting import Rewriting

LARGEST = 2**22  # elements of a constant that is made: 8 MiB in FP16


def pad_nothing(_: Surroundings, op: Operation, made: Rewriting) -> tuple[()] | None:
    """Pad(x) by nothing -> x."""
    if op.kind != "Pad" or op.input(1) not in made.constants or made.constants[op.inputs[1]].any():
        return None
    made.add(op, "Identity", op.inputs[:1], op.outputs[0])
    return ()


def added_between_reshapes(
    around: Surroundings, op: Operation, made: Rewriting
) -> tuple[Operation, ...] | None:
    """x reshaped, plus a constant, and reshaped back -> x plus the constant in x's shape."""
    if op.kind != "Reshape":
        return None
    add = around.own(op.inputs[0], "Add")
    if add is None:
        return None
    shape = made.shapes[op.outputs[0]]
    for one, other in (add.inputs, add.inputs[::-1]):
        first, values = around.own(one, "Reshape"), made.constants.get(other)
        inside = made.shapes[add.outputs[0]]
        if first is None or values is None or math.prod(shape) > LARGEST:
            continue
        if made.shapes.get(first.inputs[0]) != shape or made.shapes[one] != inside:
            continue
        whole = np.broadcast_to(values, inside).reshape(shape)
        for axis in range(whole.ndim):  # what repeats is kept once
            if (whole == whole.take([0], axis)).all():
                whole = whole.take([0], axis)
        name = made.constant(f"{other} (reshaped)", np.ascontiguousarray(whole))
        made.add(op, "Add", (first.inputs[0], name), op.outputs[0])
        return first, add
    return None


def added_twice(
    around: Surroundings, op: Operation, made: Rewriting
) -> tuple[Operation, ...] | None:
    """x plus a constant plus a constant -> x plus their sum."""
    if op.kind != "Add":
        return None
    shape = made.shapes[op.outputs[0]]
    for one, other in (op.inputs, op.inputs[::-1]):
        add, second = around.own(one, "Add"), made.constants.get(other)
        if add is None or second is None or made.shapes[one] != shape:
            continue
        for x, name in (add.inputs, add.inputs[::-1]):
            first = made.constants.get(name)
            if first is None or x in made.constants or made.shapes[x] != shape:
                continue
            if math.prod(np.broadcast_shapes(first.shape, second.shape)) > LARGEST:
                continue
            made.add(op, "Add", (x, made.constant(f"{name} (sum)", first + second)), op.outputs[0])
            return (add,)
    return None
