"""What a network puts out in FP16 or BF16: every tensor and weight is rounded to it, sums are not.

So compute the tensor cores. Kernels that fuse nodes round less often. Values above 65504 become
infinite in FP16, and NaN may follow, except in tensors that kernels keep in FP32.
"""

import itertools
from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from toolkit.errors import BuildError
from toolkit.quantize.loss.judge import Judgement, judge
from toolkit.quantize.loss.parts import output_parts, split_outputs
from toolkit.quantize.observe import ActivationRunner

MAX_JUDGES = 8
Array = NDArray[np.generic]


class HalfModel:
    """A float model in onnxruntime that rounds to 16 bits whatever its nodes make."""

    def __init__(
        self,
        model: ir.Model,
        wide: frozenset[str] = frozenset(),
        half: ir.DataType = ir.DataType.FLOAT16,
    ) -> None:
        """`wide`: tensors in FP32. Raises BuildError: onnxruntime cannot load the model."""
        self._wide = wide
        self._half = half
        self._outputs = tuple(str(value.name) for value in model.graph.outputs)
        self._run = ActivationRunner(_rounded(model, wide, half), self._outputs)

    def __call__(self, sample: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs of one sample, rounded."""
        outputs = self._run({name: self._stored(name, array) for name, array in sample.items()})
        return {name: self._stored(name, outputs[name]) for name in self._outputs}

    def _stored(self, name: str, array: Array) -> Array:
        return array if name in self._wide else _half(array, self._half)


def judge_bfloat16(
    model: ir.Model, samples: Iterable[Mapping[str, Array]], wide: frozenset[str]
) -> Judgement:
    """Judge by the limits of INT8 what BF16 loses against FP32, on the first MAX_JUDGES samples.

    `wide`: tensors in FP32. Raises BuildError: there is no sample, or onnxruntime cannot load the
    model.
    """
    parts = output_parts(model)
    run = ActivationRunner(model, [str(value.name) for value in model.graph.outputs])
    rounded = HalfModel(model, wide, ir.DataType.BFLOAT16)
    exact, actual = [], []
    for sample in itertools.islice(samples, MAX_JUDGES):
        outputs = {name: np.array(array) for name, array in run(sample).items()}
        exact.append(split_outputs(parts, outputs))
        actual.append(split_outputs(parts, rounded(sample)))
    if not exact:
        raise BuildError("BF16 is judged by samples, but the data hold none; give some.")
    return judge(parts, exact, actual, basis="bf16")


def _rounded(model: ir.Model, wide: frozenset[str], half: ir.DataType) -> ir.Model:
    """Return a copy with a cast to 16 bits and back behind every result that a node reads."""
    copy = model.clone()
    for value in copy.graph.initializers.values():
        floating = value.dtype == ir.DataType.FLOAT and value.name not in wide
        if floating and value.const_value is not None:
            numbers = _half(value.const_value.numpy(), half)
            value.const_value = ir.tensor(numbers, name=value.name)
    for node in list(copy.graph):
        for value in node.outputs:
            uses = list(value.uses())
            if value.dtype == ir.DataType.FLOAT and uses and value.name not in wide:
                back = _cast_back(copy.graph, value, half)
                for reader, index in uses:
                    reader.replace_input_with(index, back)
    copy.graph.sort()
    return copy


def _cast_back(graph: ir.Graph, value: ir.Value, half: ir.DataType) -> ir.Value:
    narrow, back = (
        ir.Value(name=f"{value.name}.{name}", shape=value.shape, type=ir.TensorType(dtype))
        for name, dtype in (("half", half), ("rounded", ir.DataType.FLOAT))
    )
    for source, result in ((value, narrow), (narrow, back)):
        assert result.dtype is not None
        to = ir.AttrInt64("to", int(result.dtype))
        graph.append(ir.Node("", "Cast", [source], [to], outputs=[result], name=str(result.name)))
    return back


def _half(array: Array, half: ir.DataType) -> Array:
    """float32 rounded to 16 bits; other types as they are."""
    if array.dtype != np.float32:
        return array
    with np.errstate(over="ignore"):
        return array.astype(half.numpy()).astype(np.float32)
