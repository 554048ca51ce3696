"""The element types that kernels read and write."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from toolkit.graph.dtypes import BFLOAT16, FLOAT8

Kind = Literal["float", "integer", "bool", "float8"]


@dataclass(frozen=True, slots=True)
class ElementType:
    """`name` in numpy; `pointer` in Triton's signatures; `bytes` of one element."""

    name: str
    pointer: str
    bytes: int
    kind: Kind


# A bool is a byte that is 0 or 1. Kernels load and store doubles and compute with them as FP32.
ELEMENT_TYPES: Mapping[str, ElementType] = {
    row.name: row
    for row in (
        ElementType("float64", "*fp64", 8, "float"),
        ElementType("float32", "*fp32", 4, "float"),
        ElementType("float16", "*fp16", 2, "float"),
        ElementType(BFLOAT16, "*bf16", 2, "float"),
        ElementType("int64", "*i64", 8, "integer"),
        ElementType("int32", "*i32", 4, "integer"),
        ElementType("int16", "*i16", 2, "integer"),
        ElementType("int8", "*i8", 1, "integer"),
        ElementType("uint64", "*u64", 8, "integer"),
        ElementType("uint32", "*u32", 4, "integer"),
        ElementType("uint16", "*u16", 2, "integer"),
        ElementType("uint8", "*u8", 1, "integer"),
        ElementType("bool", "*i8", 1, "bool"),
        ElementType(FLOAT8, "*fp8e4nv", 1, "float8"),
    )
}

# What any operator may read and write: FP8 lies between QuantizeLinear and its readers alone, BF16
# is how kernels store floats.
OPERAND_TYPES = tuple(name for name in ELEMENT_TYPES if name not in (FLOAT8, BFLOAT16))


def is_float(dtype: str) -> bool:
    """Whether tensors of this type are activations, stored in the precision of the build."""
    return ELEMENT_TYPES[dtype].kind == "float"
