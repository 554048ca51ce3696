"""The weights of a segment, packed one after the other; equal ones once."""

from dataclasses import dataclass, field

import numpy as np

from toolkit.gpu.emit.launches import WEIGHTS
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.dtypes import ELEMENT_TYPES, OPERAND_TYPES, is_float
from toolkit.gpu.ir.network import Array
from toolkit.gpu.ir.view import View, row_major

ALIGNMENT = 256  # bytes; of every allocation and every weight


@dataclass
class WeightPacker:
    """Packs constants into `data`, each at a multiple of ALIGNMENT bytes."""

    data: bytearray = field(default_factory=bytearray)
    _offsets: dict[bytes, int] = field(default_factory=dict)

    def pack(self, values: Array, dtype: str) -> View:
        """Pack constant values as `dtype`, row-major.

        Raises NotCoveredError: `dtype` is unknown, or a value overflows it.
        """
        if dtype not in ELEMENT_TYPES:
            raise NotCoveredError(
                f"a constant of type {values.dtype} is read by a kernel; kernels read "
                f"{', '.join(OPERAND_TYPES)}"
            )
        with np.errstate(over="ignore"):
            data = np.ascontiguousarray(values, dtype=dtype)
        if is_float(dtype) and not np.isfinite(data).all() and np.isfinite(values).all():
            raise NotCoveredError(
                f"a weight of size {float(np.abs(values).max()):.3g} does not fit {dtype}; build "
                "with --precision fp32"
            )
        raw = data.tobytes()
        if raw not in self._offsets:
            self.data += bytes(-len(self.data) % ALIGNMENT)
            self._offsets[raw] = len(self.data)
            self.data += raw
        offset = self._offsets[raw] // data.itemsize
        return View(WEIGHTS, dtype, values.shape, row_major(values.shape), offset)
