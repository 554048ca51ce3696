"""Changes a base model in places drawn by a seed.

A change knows ONNX's structure: it takes away, repeats and rewires nodes, and sets attributes,
shapes, types, opsets, constants, outputs and subgraphs to what no exporter writes.
"""

import random
from collections.abc import Callable

import onnx
from google.protobuf.message import DecodeError
from onnx.checker import ValidationError

from scripts.mutants.attributes import (
    attribute_type,
    change_attribute,
    drop_attribute,
    foreign_attribute,
    known_attribute,
    reference_attribute,
    repeat_attribute,
)
from scripts.mutants.bases import MAX_BASE_BYTES, base
from scripts.mutants.borders import (
    as_function,
    change_input,
    change_output,
    grow,
    quantize_value,
    wrap,
)
from scripts.mutants.constants import (
    add_constant,
    change_constant,
    drop_constant,
    false_constant,
    input_as_constant,
    replace_constant,
    reshape_constant,
    retype_constant,
)
from scripts.mutants.nodes import (
    add_input,
    change_domain,
    change_op,
    change_outputs,
    drop_input,
    drop_node,
    insert_op,
    move_node,
    rename,
    repeat_node,
    rewire,
    swap_inputs,
)
from scripts.mutants.types import (
    all_dtypes,
    change_dtype,
    change_shape,
    change_type,
    change_versions,
    drop_info,
    false_info,
)

MAX_CHANGES = (1, 1, 1, 2, 2, 3, 5)
Change = Callable[[random.Random, onnx.ModelProto], None]

CHANGES: tuple[Change, ...] = (
    *(drop_node, repeat_node, move_node, rewire, rewire, swap_inputs, drop_input, add_input),
    *(change_outputs, change_op, change_op, insert_op, insert_op, change_domain, rename),
    *(change_attribute, change_attribute, change_attribute, drop_attribute, known_attribute),
    *(known_attribute, foreign_attribute, repeat_attribute, attribute_type, reference_attribute),
    *(change_shape, change_shape, change_dtype, all_dtypes, change_type, drop_info, false_info),
    *(change_versions, change_versions, change_constant, change_constant, replace_constant),
    *(false_constant, reshape_constant, retype_constant, drop_constant, input_as_constant),
    *(add_constant, change_output, change_input, wrap, grow, quantize_value, as_function),
)


def mutant(seed: int) -> bytes:
    """Return the model file of a seed; the same seed always gives the same bytes."""
    draw = random.Random(seed)
    while True:
        proto = onnx.ModelProto()
        proto.CopyFrom(base(draw))
        if proto.ByteSize() < MAX_BASE_BYTES:
            break
    for _ in range(draw.choice(MAX_CHANGES)):
        change = draw.choice(CHANGES)
        try:
            change(draw, proto)
        except (IndexError, KeyError, ValueError, TypeError, DecodeError, ValidationError):
            continue  # the change has no place here
    data = proto.SerializeToString(deterministic=True)
    return flipped(draw, data) if draw.random() < 0.03 else data


def flipped(draw: random.Random, data: bytes) -> bytes:
    """Flip a few bits of the file."""
    damaged = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
    return bytes(damaged)
