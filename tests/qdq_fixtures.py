"""Two Q/DQ graphs of one model, compared tensor by tensor from the same INT8 operands."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quant_pre_process,
    quantize_static,
)

from toolkit.importers.onnx import import_model

Arrays = dict[str, np.ndarray]


def run_onnx(
    model: onnx.ModelProto | ir.Model, feeds: Mapping[str, np.ndarray], **options: object
) -> Arrays:
    """The outputs in onnxruntime, which is asked for exact INT8 products on any CPU."""
    proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
    asked = ort.SessionOptions()
    asked.log_severity_level = 3
    asked.add_session_config_entry("session.x64quantprecision", "1")
    session = ort.InferenceSession(
        proto.SerializeToString(), asked, providers=["CPUExecutionProvider"], **options
    )
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def run_for(model: ir.Model, names: Sequence[str], feeds: Mapping[str, np.ndarray]) -> Arrays:
    """The named tensors instead of the outputs; the model is changed."""
    values = {str(value.name): value for node in model.graph for value in node.outputs}
    model.graph.outputs.clear()
    model.graph.outputs.extend(values[name] for name in names)
    return run_onnx(model, feeds)


def on_grid(x: np.ndarray, scale: np.ndarray | float, least: int = -128) -> np.ndarray:
    """The nearest numbers of the INT8 grid, by the formula."""
    steps = np.clip(np.rint(x / np.float32(scale)), least, 127)
    return (steps * np.float32(scale)).astype(np.float32)


def rounded_activations(model: ir.Model) -> dict[str, str]:
    """Tensor -> what nodes read in its place, on the INT8 grid."""
    found = {}
    for node in model.graph:
        maker = node.inputs[0].producer() if node.op_type == "DequantizeLinear" else None
        if maker is not None and maker.inputs[0].const_value is None:
            found[str(maker.inputs[0].name)] = str(node.outputs[0].name)
    return found


def cut_before_dequantize(model: ir.Model) -> dict[str, str]:
    """Make what each DequantizeLinear of an activation gives an input: tensor -> new input."""
    fed: dict[str, str] = {}
    for node in list(model.graph):
        maker = node.inputs[0].producer() if node.op_type == "DequantizeLinear" else None
        if maker is None or maker.inputs[0].const_value is not None:
            continue
        out, name = node.outputs[0], str(maker.inputs[0].name)
        source = ir.Value(name=f"{out.name}_fed", shape=out.shape, type=out.type)
        model.graph.inputs.append(source)
        out.replace_all_uses_with(source)
        fed[str(source.name)] = name
    return fed


def int8_operands(model: ir.Model, same: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """Tensor -> the tensors that were rounded last on the way to it; `same` renames those.

    A tensor that is rounded ahead of the rectifier that makes it counts as rounded behind it.
    """
    found: dict[str, frozenset[str]] = {}

    def before(value: ir.Value, name: str) -> frozenset[str]:
        maker = value.producer()
        if maker is None:
            return frozenset({str(value.name)}) if value.const_value is None else frozenset()
        if maker.op_type == "DequantizeLinear":
            quantizer = maker.inputs[0].producer() if maker.inputs[0] is not None else None
            source = quantizer.inputs[0] if quantizer is not None else None
            if source is None or source.const_value is not None:
                return frozenset()
            rounded = same.get(str(source.name), str(source.name))
            return before(source, name) if rounded == name else frozenset({rounded})
        operands = [operand for operand in maker.inputs if operand is not None]
        return frozenset().union(*(before(operand, name) for operand in operands))

    for node in model.graph:
        for out in node.outputs:
            found[str(out.name)] = before(out, str(out.name))
    return found


def steps_apart(
    one: ir.Model, other: ir.Model, amax: Mapping[str, float], feeds: Mapping[str, np.ndarray]
) -> Arrays:
    """How many INT8 steps each tensor of two graphs differs if both read the same INT8.

    `one` runs as it is. Each node of `other` reads what the nodes of `one` read, on the INT8 grid;
    what both make is rounded to the grid of `amax`.
    """
    one, other = one.clone(), other.clone()
    names = [name for name in amax if name not in feeds]
    read = rounded_activations(one)
    seen = run_for(one, [*names, *read.values()], feeds)
    every = {**seen, **feeds}
    cut = {
        source: seen[read[name]] if name in read else on_grid(every[name], amax[name] / 127)
        for source, name in cut_before_dequantize(other).items()
    }
    found = run_for(other, names, {**feeds, **cut})
    steps = {name: amax[name] / 127 for name in names}
    return {
        name: np.abs(on_grid(found[name], step) - on_grid(seen[name], step)) / step
        for name, step in steps.items()
    }


class _Reader(CalibrationDataReader):
    def __init__(self, samples: list[np.ndarray]) -> None:
        self._left = iter(samples)

    def get_next(self) -> dict[str, np.ndarray] | None:
        x = next(self._left, None)
        return None if x is None else {"x": x}


def by_onnxruntime(
    path: Path,
    samples: list[np.ndarray],
    activations: QuantType = QuantType.QInt8,
    symmetric: bool = True,
) -> tuple[onnx.ModelProto, ir.Model]:
    """What onnxruntime's own quantizer makes of a model, as a proto and imported."""
    ready, out = path.with_suffix(".pre.onnx"), path.with_suffix(".qdq.onnx")
    quant_pre_process(path, ready)
    quantize_static(
        ready,
        out,
        _Reader(samples),
        quant_format=QuantFormat.QDQ,
        activation_type=activations,
        weight_type=QuantType.QInt8,
        per_channel=True,
        extra_options={"ActivationSymmetric": symmetric, "WeightSymmetric": True},
    )
    return onnx.load(out), import_model(out).model
