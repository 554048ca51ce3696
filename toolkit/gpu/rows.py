"""Softmax and what else runs along rows -> calls."""

from math import prod

from toolkit.gpu.draft import Draft
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.fusion import Group

_LONGEST_ROW = 16384  # elements that one block of softmax holds


def emit_softmax(draft: Draft, group: Group) -> None:
    """Add a Softmax along the last dimension."""
    op = group.root_operation
    shape = draft.network.shapes[group.result]
    axis = op.integer("axis", -1) % len(shape)
    if any(size > 1 for size in shape[axis + 1 :]):
        raise NotCoveredError(
            f"node {op.name!r} (Softmax) runs along dimension {axis} of {list(shape)}; kernels "
            "take the last"
        )
    columns = shape[axis]
    if columns > _LONGEST_ROW:
        raise NotCoveredError(
            f"node {op.name!r} (Softmax) has rows of {columns}; kernels take {_LONGEST_ROW}"
        )
    x = draft.rows(op.inputs[0])
    y = draft.make(group.result)
    block = 1 << (columns - 1).bit_length()
    call = draft.make_call(
        "softmax",
        (prod(shape) // columns, 1, 1),
        {"x": x, "y": y},
        {"COLUMNS": columns, "BLOCK": block},
        writes=(y,),
        warps=4 if block <= 4096 else 8,
    )
    draft.add(group.nodes, (call,))
