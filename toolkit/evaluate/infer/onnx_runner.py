"""Runs an ONNX model in onnxruntime on the CPU, whole or up to some of its tensors."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from device.runtime.exact_products import exact_session
from toolkit.errors import InferError, about, first_line
from toolkit.evaluate.infer.runner import Array, Arrays, Input, fitted
from toolkit.graph.dtypes import IO_DTYPES
from toolkit.graph.extract import MAX_IR_VERSION, external_weights
from toolkit.graph.max_memory import bounded_growth
from toolkit.graph.memory_limit import check_host_memory
from toolkit.graph.passes.shapes import infer_shapes
from toolkit.graph.run_limit import limited_run
from toolkit.graph.subgraph import cut_model, with_shapes
from toolkit.graph.widen import widen
from toolkit.importers.input_shapes import set_shapes

_INT8 = frozenset(
    {"QuantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger",
     "MatMulInteger"}
)  # fmt: skip


class OnnxRunner:
    """A model in onnxruntime with its usual optimizations. Sessions are made when they are used."""

    def __init__(self, model: ir.Model, title: str) -> None:
        """BF16 becomes FP32. Raises InferError: an input or output is no tensor that numpy has."""
        widen(model, ir.DataType.BFLOAT16)  # of which CPUs have next to no kernels
        self.model = model
        self.title = title
        self.inputs: tuple[Input, ...] = tuple(
            _input(value, title) for value in model.graph.inputs if not value.is_initializer()
        )
        self.outputs: tuple[str, ...] = tuple(str(value.name) for value in model.graph.outputs)
        self._session: _Session | None = None
        self._all: tuple[str, ...] | None = None

    @property
    def precision(self) -> str:
        """INT8 where the model holds Q/DQ, FP16 where its weights or inputs are of 16 bits."""
        if any(node.op_type in _INT8 for node in self.model.graph.all_nodes()):
            return "int8"
        values = [*self.model.graph.inputs, *self.model.graph.initializers.values()]
        return "fp16" if any(value.dtype == ir.DataType.FLOAT16 for value in values) else "fp32"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Nothing: it always runs in onnxruntime."""
        return ()

    def run(self, feeds: Mapping[str, Array]) -> Arrays:
        """Return the outputs; raises InferError."""
        with about(self.title):
            checked = fitted(feeds, self.inputs, self.title)
            if self._session is None:
                self._session = self._open(self.model, self.outputs, checked)
            return self._session.run(checked)

    def tensors(self, feeds: Mapping[str, Array]) -> Arrays:
        """Return every tensor of the main graph. All are outputs, so onnxruntime fuses little."""
        with about(self.title):
            if self._all is None:
                self._all = showable(self.model)
            checked = fitted(feeds, self.inputs, self.title)
            return self._open(self.model, self._all, checked).run(checked)

    def values(self, feeds: Mapping[str, Array], names: Sequence[str]) -> Arrays:
        """Return tensors, from the part of the model that computes them; raises InferError."""
        part = cut_model(self.model, None, names)
        read = {str(value.name) for value in part.graph.inputs}
        checked = fitted(feeds, self.inputs, self.title)
        needed = {name: array for name, array in checked.items() if name in read}
        return self._open(part, names, needed).run(needed)

    def _open(
        self, model: ir.Model, names: Sequence[str], feeds: Mapping[str, Array]
    ) -> "_Session":
        """Refuse tensors that do not fit into the limit of memory; return a session."""
        sized = model.clone()
        shapes = {name: array.shape for name, array in feeds.items() if 0 not in array.shape}
        set_shapes(sized, shapes, Path(self.title))
        infer_shapes(sized)
        check_host_memory(sized.graph)
        return _Session(model, names, self.title)

    def close(self) -> None:
        """Release the session."""
        self._session = None


def showable(model: ir.Model) -> tuple[str, ...]:
    """Return the tensors of the main graph that onnxruntime can hand out, in running order."""
    typed = with_shapes(model)
    return tuple(
        str(value.name)
        for node in typed.graph
        for value in node.outputs
        if value.name
        and isinstance(value.type, ir.TensorType | None)
        and (value.dtype is None or value.dtype in IO_DTYPES)
    )


class _Session:
    """A model in onnxruntime, with `names` as its outputs."""

    def __init__(self, model: ir.Model, names: Sequence[str], title: str) -> None:
        import onnxruntime as ort

        self._title = title
        self._names = list(names)
        exposed = model.clone()
        exposed.ir_version = min(model.ir_version, MAX_IR_VERSION)
        declared = {str(value.name) for value in exposed.graph.outputs}
        values = {str(v.name): v for node in exposed.graph for v in node.outputs}
        exposed.graph.outputs.extend(values[n] for n in names if n not in declared and n in values)
        weights = external_weights(exposed.graph)
        # onnxruntime reads some weights in place: they must live as long as the session.
        self._weights = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        options = ort.SessionOptions()
        options.log_severity_level = 4  # errors are raised too
        options.add_external_initializers(list(weights), self._weights)
        try:
            with bounded_growth():
                self._session = exact_session(ir.to_proto(exposed).SerializeToString(), options)
        except Exception as err:  # onnxruntime has a type of its own for every status
            raise InferError(f"onnxruntime cannot load {title}: {first_line(err)}") from err

    def run(self, feeds: Mapping[str, Array]) -> Arrays:
        try:
            with bounded_growth(), limited_run() as options:
                results = self._session.run(self._names, dict(feeds), options)
        except InferError:
            raise
        except Exception as err:
            raise InferError(
                f"onnxruntime cannot run {self._title} on these inputs: {first_line(err)}"
            ) from err
        return dict(zip(self._names, results, strict=True))


def _input(value: ir.Value, title: str) -> Input:
    dtype = IO_DTYPES.get(value.dtype or ir.DataType.UNDEFINED)
    if dtype is None or not isinstance(value.type, ir.TensorType | None):
        raise InferError(
            f"the input {value.name!r} of {title} is {value.type}, which numpy has no array for; "
            f"types that can be fed: {', '.join(IO_DTYPES.values())}"
        )
    dims = tuple(d if isinstance(d, int) else str(d.value or "") for d in value.shape or ())
    return Input(str(value.name), dtype, dims)
