"""What a network puts out in FP16: every tensor and weight is rounded to it, sums are not.

So compute the tensor cores. Kernels that fuse nodes round less often. Values above 65504 become
infinite, and NaN may follow, except in tensors that kernels keep in FP32.
"""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from toolkit.quantize.observe import ActivationRunner

Array = NDArray[np.generic]


class HalfModel:
    """A float model in onnxruntime that rounds to FP16 whatever its nodes make."""

    def __init__(self, model: ir.Model, wide: frozenset[str] = frozenset()) -> None:
        """`wide`: tensors in FP32. Raises BuildError: onnxruntime cannot load the model."""
        self._wide = wide
        self._outputs = tuple(str(value.name) for value in model.graph.outputs)
        self._run = ActivationRunner(_rounded(model, wide), self._outputs)

    def __call__(self, sample: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs of one sample, rounded."""
        wide = self._wide
        outputs = self._run({n: x if n in wide else _half(x) for n, x in sample.items()})
        return {n: outputs[n] if n in wide else _half(outputs[n]) for n in self._outputs}


def _rounded(model: ir.Model, wide: frozenset[str]) -> ir.Model:
    """Return a copy with a cast to FP16 and back behind every result that a node reads."""
    copy = model.clone()
    for value in copy.graph.initializers.values():
        floating = value.dtype == ir.DataType.FLOAT and value.name not in wide
        if floating and value.const_value is not None:
            value.const_value = ir.tensor(_half(value.const_value.numpy()), name=value.name)
    for node in list(copy.graph):
        for value in node.outputs:
            uses = list(value.uses())
            if value.dtype == ir.DataType.FLOAT and uses and value.name not in wide:
                back = _cast_back(copy.graph, value)
                for reader, index in uses:
                    reader.replace_input_with(index, back)
    copy.graph.sort()
    return copy


def _cast_back(graph: ir.Graph, value: ir.Value) -> ir.Value:
    half, back = (
        ir.Value(name=f"{value.name}.{name}", shape=value.shape, type=ir.TensorType(dtype))
        for name, dtype in (("half", ir.DataType.FLOAT16), ("rounded", ir.DataType.FLOAT))
    )
    for source, result in ((value, half), (half, back)):
        assert result.dtype is not None
        to = ir.AttrInt64("to", int(result.dtype))
        graph.append(ir.Node("", "Cast", [source], [to], outputs=[result], name=str(result.name)))
    return back


def _half(array: Array) -> Array:
    """float32 rounded to FP16; other types as they are."""
    if array.dtype != np.float32:
        return array
    with np.errstate(over="ignore"):
        return array.astype(np.float16).astype(np.float32)
