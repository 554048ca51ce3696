"""The implementations of a segment through TensorRT: ONNX that the board makes an engine of.

A segment is there in two forms, one for each way that TensorRT takes INT8. Both read the weights of
the engine file, so that those are stored once:

    ranged  TensorRT 8.5 to 10.7: a float network, and the range of each tensor
    typed   TensorRT from 11.4.1 on, on the GPU from 10.8 on: a strongly typed network, with Q/DQ in
            INT8
"""

from typing import Literal

import msgspec

from device.engine.cuda_manifest import Cuda

WEIGHTS_FILE = "weights"
"""The name under which the ONNX of a form refers to its weights, as one file beside it."""


class _Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the parts: frozen, and unknown keys are refused."""


class Weight(_Value, frozen=True, kw_only=True):
    """A weight of a form: `entry`, as `dtype`, `offset` bytes into WEIGHTS_FILE.

    With `scales`, an entry of float32, the weight is entry * scales, along `axis` if that is set.
    """

    entry: str
    dtype: Literal["float32", "float16"]
    offset: int
    scales: str | None = None
    axis: int | None = None


class Form(_Value, frozen=True, kw_only=True):
    """A segment as ONNX (an entry of uint8), with the weights that it keeps outside."""

    model: str
    weights: tuple[Weight, ...] = ()


class Port(_Value, frozen=True, kw_only=True):
    """An input or output of the segment as the DLA has it.

    `tensor`: its name, in the manifest and in the ONNX. `format`: trtexec's name of the layout.
    An int8 port holds real / `scale`.
    """

    tensor: str
    dtype: Literal["int8", "float16"]
    format: Literal["chw16", "chw32"]
    scale: float | None = None


class TensorRT(_Value, frozen=True, kw_only=True, tag="tensorrt", tag_field="kind"):
    """A segment for TensorRT on one DLA core.

    `ranges`: amax of each tensor of `ranged`, empty in FP16. `half_nodes`: those that compute in
    FP16 in an INT8 segment. `enter`, `leave`: GPU kernels for each of `inputs` and `outputs`, which
    bring a tensor from C order into the port's format, and back; none where the host does it.
    `take_turns`: frames follow each other closely, and go to all DLA cores in turn.
    `ranged_problem`, `typed_problem`: why no TensorRT takes this form, "" if one may.
    """

    ranged: Form
    typed: Form
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    ranges: dict[str, float]
    half_nodes: tuple[str, ...] = ()
    enter: tuple[Cuda, ...] = ()
    leave: tuple[Cuda, ...] = ()
    take_turns: bool = False
    ranged_problem: str = ""
    typed_problem: str = ""


class TensorRTGpu(_Value, frozen=True, kw_only=True, tag="tensorrt_gpu", tag_field="kind"):
    """A segment for TensorRT on the GPU, beside kernels (`cuda`) or in their place.

    Its inputs and outputs are in C order and in the manifest's types. `precision`: the lowest of
    its layers. A form that is None has a problem, which says why. `ranges`: amax of each tensor of
    `ranged`, in INT8. `half_nodes`: those that compute in floating point in an INT8 segment.
    """

    precision: Literal["fp32", "fp16", "int8"]
    ranged: Form | None = None
    typed: Form | None = None
    ranges: dict[str, float] = {}
    half_nodes: tuple[str, ...] = ()
    ranged_problem: str = ""
    typed_problem: str = ""

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms that there are; one in FP32 is both."""
        forms = [form for form in (self.ranged, self.typed) if form is not None]
        return tuple(forms[:1] if self.ranged == self.typed else forms)
