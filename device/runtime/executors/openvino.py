"""Runs a portable segment with OpenVINO on the CPU. It is asked for, never chosen: INT8 is faster
than onnxruntime's on x86 with VNNI, and rounds otherwise (docs/serving.md).

openvino and onnx are imported only when a segment is opened.
"""

import platform
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from device.engine.manifest import Portable
from device.errors import SessionError, shortened
from device.install_advice import why_missing
from device.runtime.exact_products import cpu_flags, int8_products_saturate
from device.runtime.executors import emulated
from device.runtime.executors.protocol import (
    Array,
    Arrays,
    Executor,
    SegmentContext,
    Sizes,
    Targets,
)

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from onnx import ModelProto

# OpenVINO's settings, with why.
_SETTINGS: Mapping[str, object] = {
    "INFERENCE_PRECISION_HINT": "f32",  # CPUs with AMX would compute in bfloat16
    "EXECUTION_MODE_HINT": "ACCURACY",  # no activations in INT8 beside compressed weights
    "PERFORMANCE_HINT": "LATENCY",
    "ENABLE_CPU_PINNING": False,  # sessions side by side would share the first cores
}
# Where INT8 products saturate: Q/DQ in float. In 2026.4 a sum of 9.3 million was 73 thousand.
_FLOAT_PRODUCTS: Mapping[str, object] = {"LP_TRANSFORMS_MODE": "NO"}


def why_not() -> str | None:
    """Return why segments cannot run this way here, or None if they can."""
    return why_missing("openvino", "openvino") or why_missing("onnx", "openvino")


def requested(context: SegmentContext) -> bool:
    """Return whether the session asks for OpenVINO, and not for the segment's emulation."""
    return context.options.executor == "openvino" and not emulated.requested(context)


def load(context: SegmentContext, implementation: Portable) -> Executor:
    """Load a segment; see `OpenVinoExecutor`."""
    return OpenVinoExecutor(context, implementation)


class OpenVinoExecutor(Executor):
    """One segment, compiled by OpenVINO, which keeps a copy of the weights packed for the CPU.

    Inputs and outputs stay in the caller's arrays; an input that may not be written is copied.
    """

    def __init__(self, context: SegmentContext, implementation: Portable) -> None:
        """Raises SessionError if OpenVINO refuses the model, or it is not that of the segment."""
        import openvino

        self._where = context.where
        self._version = openvino.__version__.partition("-")[0]
        self._tensor, self._shape = openvino.Tensor, openvino.Shape
        model = _whole_model(context, implementation)
        try:
            core = _core()
            compiled = core.compile_model(
                core.read_model(model.SerializeToString()), "CPU", _settings(context)
            )
        except (RuntimeError, ValueError) as error:  # a model above 2 GB is a ValueError
            raise SessionError(
                f"{self._where} cannot be loaded by OpenVINO: {_told(error)}"
            ) from error
        # By position: two outputs may be one tensor, with the names of both.
        self._inputs = {info.name: number for number, info in enumerate(model.graph.input)}
        self._outputs = {info.name: number for number, info in enumerate(model.graph.output)}
        self._ports = compiled.outputs
        self._request: Any = compiled.create_infer_request()
        self._check("inputs", context, context.segment.inputs, self._inputs, compiled.inputs)
        self._check("outputs", context, context.segment.outputs, self._outputs, self._ports)

    @property
    def description(self) -> str:
        """The version of OpenVINO."""
        return f"OpenVINO {self._version}, CPU"

    def run(self, inputs: Arrays, outputs: Targets, sizes: Sizes) -> dict[str, Array]:
        """Run the segment; see `Executor.run`. OpenVINO reads the sizes from the shapes."""
        request, wrap = self._request, self._tensor
        try:
            for name, array in inputs.items():
                tensor = wrap(array, shared_memory=array.flags.writeable)
                request.set_input_tensor(self._inputs[name], tensor)
            for name, target in outputs.items():
                number = self._outputs[name]
                tensor = self._new(number) if target is None else wrap(target, shared_memory=True)
                request.set_output_tensor(number, tensor)
            request.infer()
        except (RuntimeError, ValueError) as error:
            raise SessionError(f"{self._where} failed in OpenVINO: {_told(error)}") from error
        return {name: self._result(name, target) for name, target in outputs.items()}

    def _new(self, number: int) -> Any:  # noqa: ANN401
        """Return memory for an output, which grows where a run tells its size."""
        port = self._ports[number]
        shape = port.get_partial_shape()
        sizes = (
            [] if shape.rank.is_dynamic else [0 if d.is_dynamic else d.get_length() for d in shape]
        )
        return self._tensor(port.get_element_type(), self._shape(sizes))

    def _result(self, name: str, target: "Array | None") -> Array:
        tensor = self._request.get_output_tensor(self._outputs[name])
        if target is None:
            return np.asarray(tensor.data)  # keeps the tensor
        if tuple(tensor.shape) != target.shape:
            raise SessionError(
                f"{self._where}: output {name!r} has the shape {tuple(tensor.shape)}, its array "
                f"{target.shape}"
            )
        return target

    def _check(
        self,
        title: str,
        context: SegmentContext,
        names: tuple[str, ...],
        numbers: Mapping[str, int],
        ports: Any,  # noqa: ANN401
    ) -> None:
        """Compare what OpenVINO has with what the manifest says: the arena relies on it."""
        stated = {name: context.tensors[name].dtype for name in names}
        actual = dict(
            zip(numbers, (str(p.get_element_type().to_dtype()) for p in ports), strict=False)
        )
        if actual != stated or len(ports) != len(numbers):
            raise SessionError(
                f"{self._where} has the {title} {stated}, OpenVINO's model {actual}; build the "
                "engine again"
            )

    def close(self) -> None:
        """Release the request, and with it the compiled model; outputs stay valid."""
        self._request = self._ports = None


def _whole_model(context: SegmentContext, implementation: Portable) -> "ModelProto":
    """Return a segment's ONNX with its weights inside, as OpenVINO reads no others from memory.

    Raises SessionError: it is none, or names weights that are not the engine's, which OpenVINO
    would read from any file.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load_from_string(context.engine.entry(implementation.model).tobytes())
    except DecodeError as error:
        raise SessionError(f"{context.where} holds no readable ONNX model") from error
    for tensor in _tensors(model):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        if tensor.name not in implementation.weights:
            raise SessionError(
                f"{context.where} has weights {tensor.name!r} outside the engine; build it again"
            )
        tensor.raw_data = context.engine.entry(tensor.name).tobytes()
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
    return model


def _tensors(message: "Message") -> Iterator[Any]:
    """Yield every TensorProto in a model, those of attributes and branches included."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for part in (value,) if hasattr(value, "ListFields") else value:
            if field.message_type.name == "TensorProto":
                yield part
            else:
                yield from _tensors(part)


def _settings(context: SegmentContext) -> dict[str, object]:
    settings = dict(_SETTINGS)
    if context.options.threads is not None:
        settings["INFERENCE_NUM_THREADS"] = context.options.threads
    if int8_products_saturate(platform.machine(), cpu_flags()):
        settings |= _FLOAT_PRODUCTS
    return settings


@cache
def _core() -> Any:  # noqa: ANN401
    """Return this process's OpenVINO, which finds its plugins once."""
    import openvino

    return openvino.Core()


def _told(error: Exception) -> str:
    """Return what an error says, without the places in OpenVINO's sources."""
    lines = [line for line in str(error).splitlines() if line and "Exception from" not in line]
    return shortened(" ".join(lines) or str(error))
