"""Weights of 4 bits in blocks of the depth: one constant, which every step may read as floats.

    w[k, n] = (q[k, n] - zero[k // block, n]) * scale[k // block, n],    0 <= q < 16

A pass that computes other numbers from such a constant replaces it by a plain one, so the integers
are there exactly as long as they are right.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

SYMMETRIC_ZERO = 8  # of integers from 0 to 15
_DTYPES = {ir.DataType.FLOAT: np.float32, ir.DataType.FLOAT16: np.float16}


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """`integers` uint8 (depth, columns); `scales` float32, `zeros` uint8 (blocks, columns)."""

    integers: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8]
    block: int

    def restored(self) -> NDArray[np.float32]:
        """Return the numbers that the integers stand for, (depth, columns)."""
        scales, zeros = (self._along_depth(array) for array in (self.scales, self.zeros))
        restored: NDArray[np.float32] = (self.integers.astype(np.float32) - zeros) * scales
        return restored

    def _along_depth(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.repeat(array, self.block, 0)[: len(self.integers)]

    @property
    def packed_bytes(self) -> int:
        """Half a byte for each integer, and what kernels read of blocks: 4 for a scale.

        They read 4 for a zero point, too, where one of them is not SYMMETRIC_ZERO.
        """
        numbers = 1 if (self.zeros == SYMMETRIC_ZERO).all() else 2
        return self.integers.size // 2 + 4 * numbers * self.scales.size


class BlockTensor(ir.LazyTensor):
    """A constant (depth, columns), or (columns, depth) if `transposed`, given by `weight`."""

    def __init__(
        self, weight: BlockWeight, dtype: ir.DataType, name: str, *, transposed: bool = False
    ) -> None:
        depth, columns = weight.integers.shape
        shape = ir.Shape((columns, depth) if transposed else (depth, columns))
        super().__init__(self._floats, dtype, shape, name=name)
        self.weight = weight
        self.packed_bytes = weight.packed_bytes
        self.transposed = transposed

    def _floats(self) -> ir.TensorProtocol:
        restored = self.weight.restored()
        array = np.ascontiguousarray(restored.T if self.transposed else restored)
        return ir.Tensor(array.astype(_DTYPES[self.dtype]), name=self.name)


def is_storable(dtype: ir.DataType | None) -> bool:
    """Whether a `BlockTensor` may have this type."""
    return dtype in _DTYPES
