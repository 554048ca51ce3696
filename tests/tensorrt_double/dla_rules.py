"""What the DLA takes, for the double of TensorRT: NVIDIA's pages, read apart from Tandem's table.

Nothing here comes from toolkit/dla/rules, so that a misreading is not in both;
tests/test_double_rules.py compares the two. A source names the page and the place in it:

    page N        "DLA Supported Layers and Restrictions" of the TensorRT documentation
                  (docs.nvidia.com/deeplearning/tensorrt, inference-library), its Nth sentence or
                  bullet below the title; "page, row R" is row R of its table
    runtime N     "DLA Runtime Configuration" there, counted alike
    NvInfer.h     of the release named, with the line
    matrix        operators/README.md of NVIDIA's Deep-Learning-Accelerator-SW, June 2024
    guide 8.5     the developer guide of TensorRT 8.5, DLA supported layers
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Version = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """A tensor of the network. `shape` None and sizes None are unknown; `value` of constants."""

    name: str
    shape: tuple[int | None, ...] | None
    dtype: str
    constant: bool = False
    value: np.ndarray | None = None


@dataclass(frozen=True)
class Layer:
    """A node of ONNX as TensorRT's parser meets it. `before`, `after`: the operators next to it."""

    name: str
    op: str
    domain: str
    attributes: Mapping[str, Any]
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def input(self, index: int) -> Tensor | None:
        return self.inputs[index] if index < len(self.inputs) else None

    @property
    def flowing(self) -> tuple[Tensor, ...]:
        """Everything that is computed."""
        return (*(t for t in self.inputs if t is not None and not t.constant), *self.outputs)


@dataclass(frozen=True)
class Build:
    """What a layer is built for. `dla`: xavier or orin; `precision`: fp32, fp16 or int8."""

    dla: str
    tensorrt: Version
    precision: str


Problem = Callable[[Layer, Build], str | None]


@dataclass(frozen=True)
class Rule:
    """A limit of some operators (None: of all): `problem` says what breaks it."""

    ops: frozenset[str] | None
    source: str
    problem: Problem
    since: Version = (0,)
    until: Version | None = None
    dla: str | None = None

    def holds(self, layer: Layer, build: Build) -> bool:
        return (
            (self.ops is None or layer.op in self.ops)
            and self.dla in (None, build.dla)
            and self.since <= build.tensorrt
            and (self.until is None or build.tensorrt < self.until)
        )


def problems(layer: Layer, build: Build) -> list[str]:
    """Return why the DLA does not take a layer, each with its source."""
    found = []
    for rule in RULES:
        if rule.holds(layer, build):
            text = rule.problem(layer, build)
            if text is not None:
                found.append(f"{text} ({rule.source})")
    return found


# --- what the rules read


def _ops(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _ranks(*allowed: int) -> Problem:
    def problem(layer: Layer, build: Build) -> str | None:
        bad = [t for t in layer.flowing if t.shape is not None and len(t.shape) not in allowed]
        return f"{bad[0].name} has {len(bad[0].shape or ())} dimensions" if bad else None

    return problem


def _pair(layer: Layer, name: str) -> tuple[int, ...]:
    """Kernel, strides or dilations; kernels of convolutions come from their weights."""
    value = layer.attributes.get(name)
    if value:
        return tuple(value)
    weights = layer.input(1)
    if name != "kernel_shape":
        return (1, 1)
    return tuple(weights.shape[2:]) if weights is not None and weights.shape else ()


def _pads(layer: Layer) -> tuple[int, ...] | None:
    """Begin and end of each axis, None where sizes that are not known decide."""
    how = layer.attributes.get("auto_pad") or "NOTSET"
    how = how.decode() if isinstance(how, bytes) else how
    if how == "VALID":
        return (0, 0, 0, 0)
    if how == "NOTSET":
        return tuple(layer.attributes.get("pads") or (0, 0, 0, 0))
    data = layer.input(0)
    if data is None or data.shape is None or None in data.shape:
        return None
    kernel, strides = _pair(layer, "kernel_shape"), _pair(layer, "strides")
    dilations = _pair(layer, "dilations")
    total = [
        max(0, (-(-size // s) - 1) * s + (k - 1) * d + 1 - size)
        for size, k, s, d in zip(data.shape[2:], kernel, strides, dilations, strict=False)
    ]
    small, large = [t // 2 for t in total], [t - t // 2 for t in total]
    return tuple(small + large if how == "SAME_UPPER" else large + small)


def _each_in(name: str, low: int, high: int) -> Problem:
    def problem(layer: Layer, build: Build) -> str | None:
        values = _pair(layer, name)
        if all(low <= value <= high for value in values):
            return None
        return f"{name} {values} is beyond [{low}, {high}]"

    return problem


def _padding(high: int, *, below_kernel: bool) -> Problem:
    def problem(layer: Layer, build: Build) -> str | None:
        pads, kernel = _pads(layer), _pair(layer, "kernel_shape")
        if pads is None:
            return "its padding is not known"
        if any(not 0 <= pad <= high for pad in pads):
            return f"padding {pads} is beyond [0, {high}]"
        if below_kernel and any(pad >= k for pad, k in zip(pads, kernel + kernel, strict=False)):
            return f"padding {pads} is not less than the kernel {kernel}"
        return None

    return problem


def _never(text: str) -> Problem:
    return lambda layer, build: text


def _int8_only(layer: Layer, build: Build) -> str | None:
    return None if build.precision == "int8" else f"{layer.op} in {build.precision}, not INT8"


def _axis(layer: Layer, default: int) -> int | None:
    data, axis = layer.input(0), int(layer.attributes.get("axis", default))
    if axis >= 0:
        return axis
    return None if data is None or data.shape is None else axis + len(data.shape)


def _sizes(tensor: Tensor | None) -> list[int]:
    shape = () if tensor is None else tensor.shape or ()
    return [] if None in shape else [int(size) for size in shape if size is not None]


# --- of every layer


def _precision(layer: Layer, build: Build) -> str | None:
    return "FP32" if build.precision == "fp32" else None


def _listed(layer: Layer, build: Build) -> str | None:
    if layer.domain not in ("", "ai.onnx"):
        return f"{layer.domain}::{layer.op} is a plugin"
    if layer.op in NATIVE or (layer.op in FROM_8_6_12 and build.tensorrt >= (8, 6, 12)):
        return None
    return f"{layer.op} is not supported on DLA"


def _fixed(layer: Layer, build: Build) -> str | None:
    bad = [t for t in layer.flowing if t.shape is None or None in t.shape]
    return f"{bad[0].name} has dynamic dimensions" if bad else None


def _batch_of(tensor: Tensor) -> int:
    return math.prod(_sizes(tensor)[:-3])


def _batch(limit: int) -> Problem:
    def problem(layer: Layer, build: Build) -> str | None:
        batch = max((_batch_of(tensor) for tensor in layer.flowing), default=1)
        return f"batch {batch} exceeds max batch size allowed of {limit}" if batch > limit else None

    return problem


def _dimensions(layer: Layer, build: Build) -> str | None:
    for tensor in layer.flowing:
        for size in _sizes(tensor)[-3:]:
            if not 1 <= size <= 8192:
                return f"{tensor.name} has a dimension of {size}, beyond [1, 8192]"
    return None


def _volume(layer: Layer, build: Build) -> str | None:
    bad = [t for t in layer.flowing if math.prod(_sizes(t)) >= 2**31]
    return f"{bad[0].name} has 2^31 elements or more" if bad else None


def _types(layer: Layer, build: Build) -> str | None:
    logical = {t.name for t in layer.outputs} if layer.op in COMPARISONS else set()
    if layer.op == "Cast":
        logical = {t.name for t in layer.inputs if t is not None}
    for tensor in layer.flowing:
        if tensor.name not in logical and tensor.dtype not in ("float32", "float16", "int8"):
            return f"{tensor.name} is {tensor.dtype}, neither FP16 nor INT8"
    return None


# --- convolutions


def _channels(layer: Layer, index: int) -> int | None:
    tensor = layer.input(0) if index == 0 else layer.outputs[0]
    shape = tensor.shape if tensor is not None else None
    if not shape or len(shape) < 2:
        return None
    return shape[-1] if layer.op in ("Gemm", "MatMul") else shape[1]


def _maps(layer: Layer, build: Build) -> str | None:
    for index, text in ((0, "input channels"), (1, "output maps")):
        count = _channels(layer, index)
        if count is not None and not 1 <= count <= 8192:
            return f"{count} {text} are beyond [1, 8192]"
    return None


def _groups(layer: Layer, build: Build) -> str | None:
    groups = int(layer.attributes.get("group", 1))
    return None if 1 <= groups <= 8192 else f"{groups} groups are beyond [1, 8192]"


def _groups_int8(layer: Layer, build: Build) -> str | None:
    groups, ins, outs = (
        int(layer.attributes.get("group", 1)), _channels(layer, 0), _channels(layer, 1)
    )  # fmt: skip
    if build.precision != "int8" or groups <= 1 or ins is None or outs is None:
        return None
    if ins == outs == groups:
        return None  # depthwise: NVIDIA's README has INT8 figures of SSD-MobileNet-V1 on the DLA
    sizes = ins // groups, outs // groups
    return f"INT8 groups of {sizes} channels are no multiples of 4" if any(
        size % 4 for size in sizes
    ) else None  # fmt: skip


def _constant_weights(layer: Layer, build: Build) -> str | None:
    bad = [t for t in layer.inputs[1:] if t is not None and not t.constant]
    return f"{bad[0].name} is computed, and weights are constant" if bad else None


def _buffer(layer: Layer, build: Build) -> str | None:
    data = layer.input(0)
    if data is None or data.shape is None or None in data.shape or len(data.shape) < 2:
        return None
    each = 1 if build.precision == "int8" else 2
    matrix = layer.op in ("Gemm", "MatMul")
    kernel = (1, 1) if matrix else _pair(layer, "kernel_shape")
    if len(kernel) != 2 or (not matrix and len(data.shape) != 4):
        return None
    channels = int(data.shape[-1] if matrix else data.shape[1])  # type: ignore[arg-type]
    width = 1 if matrix else int(data.shape[3])  # type: ignore[arg-type]
    weights = math.ceil(math.ceil(channels * kernel[0] * kernel[1] * each / 128) * 128 / 32768)
    slices = math.ceil(math.ceil(channels * each / 32) * width / 4)
    lines = (kernel[0] - 1) * (1 if matrix else _pair(layer, "dilations")[0]) + 1
    data_banks = math.ceil(slices * lines / 256)
    if weights + data_banks <= 16:
        return None
    return f"{weights} + {data_banks} banks of the convolution buffer, which has 16"


def _product(layer: Layer, build: Build) -> str | None:
    return "its first operand is transposed" if layer.attributes.get("transA", 0) else None


def _long_or_short(name: str) -> Problem:
    def problem(layer: Layer, build: Build) -> str | None:
        values = _pair(layer, name)
        short = all(1 <= value <= 32 for value in values)
        long = sorted(values)[0] == 1 and sorted(values)[-1] in (64, 96, 128) if values else True
        return None if short or long else f"{name} {values}"

    return problem


def _no_padding(layer: Layer, build: Build) -> str | None:
    asked = layer.attributes.get("output_shape")
    if asked:
        return f"output_shape {tuple(asked)} is made by padding"
    if any(layer.attributes.get("output_padding") or ()) or any(_pads(layer) or ()):
        return "padding is not 0"
    return None


def _slow_squares(layer: Layer, build: Build) -> str | None:
    for name in ("kernel_shape", "strides"):
        values = _pair(layer, name)
        if len(set(values)) == 1 and 23 <= values[0] <= 32:
            return f"{name} {values} is a square in [23, 32]"
    return None


def _one_group(layer: Layer, build: Build) -> str | None:
    return None if layer.attributes.get("group", 1) == 1 else "a grouped deconvolution"


# --- pooling, activations, element-wise


def _one_output(layer: Layer, build: Build) -> str | None:
    return "the indices of MaxPool" if len(layer.outputs) > 1 else None


def _inclusive(layer: Layer, build: Build) -> str | None:
    padded, counted = any(_pads(layer) or ()), layer.attributes.get("count_include_pad", 0)
    return "an average without its padding" if padded and not counted else None


def _bound(layer: Layer, index: int, name: str) -> float | None:
    tensor = layer.input(index)
    value = layer.attributes.get(name) if tensor is None else tensor.value
    return None if value is None else float(np.reshape(value, -1)[0])


def _clipped(layer: Layer, build: Build) -> str | None:
    low, high = _bound(layer, 1, "min"), _bound(layer, 2, "max")
    if low != 0:
        return f"it clips below at {low}, a clipped ReLU at 0"
    if high is None or not 1 <= high <= 127:
        return f"it clips above at {high}, beyond [1, 127]"
    return None


def _slope(layer: Layer, build: Build) -> str | None:
    data, slope = layer.input(0), layer.input(1)
    if slope is not None and not slope.constant:
        return "its slopes are no build-time constant"
    known = data is not None and slope is not None and data.shape and slope.shape is not None
    if known and len(data.shape) != len(slope.shape):  # type: ignore[union-attr,arg-type]
        return "its slopes have another rank than its input"
    return None


def _broadcast(layer: Layer, build: Build) -> str | None:
    full = _sizes(layer.outputs[0])
    if len(full) != 4:
        return None
    for tensor in layer.inputs:
        sizes = _sizes(tensor)
        sizes = [1] * (4 - len(sizes)) + sizes
        n, rest = sizes[0], sizes[1:]
        if n not in (1, full[0]) or rest not in (full[1:], [full[1], 1, 1], [1, 1, 1]):
            return f"{tensor.name if tensor else ''} is broadcast as {sizes}"
    return None


def _dividend(layer: Layer, build: Build) -> str | None:
    divisor = layer.input(1)
    computed = divisor is not None and not divisor.constant
    return "a divisor that is computed, not in INT8" if computed and (
        build.precision != "int8"
    ) else None  # fmt: skip


def _power(layer: Layer, build: Build) -> str | None:
    if build.precision != "int8":
        return f"Pow in {build.precision}"
    constants = [t.value for t in layer.inputs if t is not None and t.value is not None]
    if any(np.unique(value).size == 1 for value in constants):
        return None
    return "no side of Pow is one repeated constant"


def _cast_at_once(layer: Layer, build: Build) -> str | None:
    return None if layer.after == ("Cast",) else f"its output goes to {layer.after}, not to a Cast"


def _behind_comparison(layer: Layer, build: Build) -> str | None:
    return None if set(layer.before) & COMPARISONS else "a Cast that is behind no comparison"


def _window_of_lrn(layer: Layer, build: Build) -> str | None:
    size = layer.attributes.get("size")
    return None if size in (3, 5, 7, 9) else f"a window of {size}"


# --- shapes


def _third_to_last(layer: Layer, build: Build) -> str | None:
    axis, data = _axis(layer, 0), layer.input(0)
    if axis is None or data is None or data.shape is None:
        return None
    return None if axis == len(data.shape) - 3 else f"it concatenates axis {axis}"


def _two_inputs(layer: Layer, build: Build) -> str | None:
    return "it has one input" if len(layer.inputs) < 2 else None


def _four_dimensions(layer: Layer, build: Build) -> str | None:
    data = layer.input(0)
    bad = data is not None and data.shape is not None and len(data.shape) != 4
    return f"an input of {len(data.shape)} dimensions" if bad else None  # type: ignore[union-attr,arg-type]


def _static_slice(layer: Layer, build: Build) -> str | None:
    bad = [t for t in layer.inputs[1:] if t is not None and t.name and not t.constant]
    return f"{bad[0].name} is no build-time constant" if bad else None


def _unit_steps(layer: Layer, build: Build) -> str | None:
    steps = layer.input(4) if layer.op == "Slice" else None
    if steps is None or steps.value is None or np.all(steps.value == 1):
        return None
    return f"steps of {steps.value.tolist()}"


def _whole_batch(layer: Layer, build: Build) -> str | None:
    data, out = layer.input(0), layer.outputs[0]
    if data is None or not data.shape or not out.shape:
        return None
    return None if data.shape[0] == out.shape[0] else "it slices the first dimension"


def _scales(layer: Layer) -> list[float] | None:
    tensor, data = layer.input(1 if layer.op == "Upsample" else 2), layer.input(0)
    if tensor is None or tensor.value is None or not tensor.value.size:
        return None
    scales = [float(value) for value in tensor.value.reshape(-1)]
    axes = layer.attributes.get("axes")
    if not axes or data is None or data.shape is None:
        return scales
    full = [1.0] * len(data.shape)
    for axis, scale in zip(axes, scales, strict=True):
        full[axis] = scale
    return full


def _resize_scales(layer: Layer, build: Build) -> str | None:
    if layer.op == "Resize" and layer.input(3) is not None:
        return "output dimensions are set"
    scales = _scales(layer)
    if scales is None:
        return "its scales are no build-time constants"
    if len(scales) != 4 or scales[:2] != [1.0, 1.0]:
        return f"scales {scales}: four, of which the first two are 1"
    linear = _text(layer, "mode") == "linear" and build.tensorrt >= (8, 4)
    largest = 4 if linear else 32
    if any(scale != math.floor(min(scale, 1e9)) or not 1 <= scale <= largest
           for scale in scales[2:]):  # fmt: skip
        return f"scales {scales}: integers in [1, {largest}]"
    return None


def _text(layer: Layer, name: str) -> str:
    value = layer.attributes.get(name, "")
    return value.decode() if isinstance(value, bytes) else str(value)


def _resize_mode(layer: Layer, build: Build) -> str | None:
    mode = _text(layer, "mode") or "nearest"
    if layer.op == "Upsample":
        how: tuple[str, ...] = (mode, "asymmetric", "floor")
    else:
        how = (
            mode,
            _text(layer, "coordinate_transformation_mode") or "half_pixel",
            _text(layer, "nearest_mode") or "round_prefer_floor",
        )
    how = how if mode == "nearest" else how[:2]
    return None if how in RESIZES else f"resize {' '.join(how)}"


def _softmax_axis(layer: Layer, build: Build) -> str | None:
    axis = _axis(layer, -1)
    return "softmax along the batch" if axis == 0 else None


def _softmax_size(layer: Layer, build: Build) -> str | None:
    sizes, axis = _sizes(layer.input(0)), _axis(layer, -1)
    if axis is None or not 0 < axis < len(sizes):
        return None
    alone = all(size == 1 for place, size in enumerate(sizes) if place not in (0, axis))
    limit = 8192 if alone else 1024
    return f"softmax of {sizes[axis]}, beyond {limit}" if sizes[axis] > limit else None


def _batch_stays(layer: Layer, build: Build) -> str | None:
    order = layer.attributes.get("perm")
    if order and order[0] != 0:
        return "the batch is transposed"
    data, out = layer.input(0), layer.outputs[0]
    if data is None or not data.shape or not out.shape:
        return None
    return None if data.shape[0] == out.shape[0] else "the batch is reshaped"


def _beside_slice(layer: Layer, build: Build) -> str | None:
    beside = {*layer.before, *layer.after} & {"Slice", "Split", "Concat"}
    return (
        "this version of DLA does not support reshape layers directly connected to Slice or Concat"
        if beside
        else None
    )


def _reduced(layer: Layer, build: Build) -> str | None:
    if layer.op == "GlobalMaxPool":
        return None
    tensor, data = layer.input(1), layer.input(0)
    axes = layer.attributes.get("axes") if tensor is None else tensor.value
    rank = len(data.shape or ()) if data is not None else 4
    if axes is None or any(int(axis) % max(rank, 1) == 0 for axis in np.reshape(axes, -1)):
        return "it reduces the batch, or axes that are not known"
    return None


def _smaller(layer: Layer, build: Build) -> str | None:
    return None if layer.op == "Abs" else f"Unary operation: {layer.op} is not supported on DLA"


COMPARISONS = _ops("Equal Greater Less")
RESIZES = {
    ("nearest", "asymmetric", "floor"),
    ("nearest", "half_pixel", "round_prefer_floor"),
    ("nearest", "half_pixel", "round_prefer_ceil"),
    ("linear", "half_pixel"),
    ("linear", "pytorch_half_pixel"),
}
"""Coordinates and rounding by ONNX's names: kHALF_DOWN is round_prefer_floor, kUPPER pytorch's."""

NATIVE = _ops(
    "Abs Add AveragePool BatchNormalization Clip Concat Conv ConvTranspose Equal Gemm LeakyRelu "
    "LRN MatMul Max MaxPool Min Mul PRelu Relu Reshape Resize Sigmoid Slice Softmax Split Sub Sum "
    "Tanh Transpose Upsample Cast"
)
"""Native in the matrix. Min: NvInfer.h and the page's table have it. Cast: page, row Comparison."""

FROM_8_6_12 = _ops("Atanh Cos Div GlobalMaxPool Greater Less Sin Pow ReduceMax")
"""Native from 8.6.12 on in the matrix. Pow: page, row ElementWise; ReduceMax: what a second row
"GlobalMaxPool" of the matrix was in the revision before."""

CONV, DECONV, MATRIX = _ops("Conv"), _ops("ConvTranspose"), _ops("Gemm MatMul")
POOL, CUT, SHUFFLE = _ops("MaxPool AveragePool"), _ops("Slice Split"), _ops("Reshape Transpose")
ELEMENTWISE = _ops("Add Sub Mul Max Min Sum Div Pow Equal Greater Less")
RESIZE, REDUCE = _ops("Resize Upsample"), _ops("ReduceMax GlobalMaxPool")
ACTIVATION, UNARY = _ops("Relu Sigmoid Tanh Clip LeakyRelu"), _ops("Abs Atanh Cos Sin")
H = "NvInfer.h 10.3.0"

# fmt: off
RULES: tuple[Rule, ...] = (
    Rule(None, "page, column Precision", _precision),
    Rule(None, "Working with DLA, 11.3.0, sentences 1 to 3; 11.4.1, bullet 1",
         _never("TensorRT 10.8 to 11.4.0 has no DLA on Jetson"), (10, 8), (11, 4, 1)),
    Rule(None, "JetPack 6 has no Xavier", _never("no TensorRT from 8.6 on is for Xavier"),
         since=(8, 6), dla="xavier"),
    Rule(None, "JetPack 5.0 is the first with Orin", _never("no TensorRT before 8.4 is for Orin"),
         until=(8, 4), dla="orin"),
    Rule(None, "matrix, column TensorRT; runtime 3", _listed),
    Rule(None, "page 5; NvInfer.h 10.3.0:6293", _fixed),
    Rule(None, "page 3, 13 and 14", _batch(4096)),
    Rule(None, "TensorRT's log in NVIDIA/TensorRT issue 2318", _batch(32), dla="xavier"),
    Rule(None, "page 4", _dimensions),
    Rule(None, f"{H}:176", _volume),
    Rule(None, "page, column Precision", _types),

    Rule(CONV | DECONV, "page, rows Convolution and Deconvolution", _ranks(4)),
    Rule(CONV, f"{H}:1208", _each_in("kernel_shape", 1, 32)),
    Rule(CONV, f"{H}:1132 and 1159", _padding(31, below_kernel=True)),
    Rule(CONV, f"{H}:1233", _each_in("strides", 1, 8)),
    Rule(CONV, f"{H}:1288", _each_in("dilations", 1, 32)),
    Rule(CONV | DECONV | MATRIX, f"{H}:1027; page, row Convolution", _maps),
    Rule(CONV, f"{H}:1057", _groups),
    Rule(CONV, f"{H}:1052", _groups_int8),
    Rule(CONV | DECONV | MATRIX | _ops("BatchNormalization"), "matrix, rows Gemm and MatMul",
         _constant_weights),
    Rule(CONV | MATRIX, "guide 8.5, convolution buffer", _buffer),
    Rule(MATRIX, "matrix, row Gemm: the second input alone is folded", _product),
    Rule(DECONV, f"{H}:2279", _long_or_short("kernel_shape")),
    Rule(DECONV, f"{H}:2306", _long_or_short("strides")),
    Rule(DECONV, f"{H}:2337; page, row Deconvolution", _no_padding),
    Rule(DECONV, f"{H}:2123; page, row Deconvolution", _one_group),
    Rule(DECONV, "page, row Deconvolution", _each_in("dilations", 1, 1)),
    Rule(DECONV, "guide 8.5, Deconvolution", _slow_squares),

    Rule(POOL, f"{H}:1616: 2-D windows", _ranks(4)),
    Rule(POOL, f"{H}:1616", _each_in("kernel_shape", 1, 8)),
    Rule(POOL, f"{H}:1541 and 1569", _padding(7, below_kernel=False)),
    Rule(POOL, f"{H}:1641", _each_in("strides", 1, 16)),
    Rule(POOL, "ONNX operators of TensorRT: no dilation", _each_in("dilations", 1, 1)),
    Rule(_ops("MaxPool"), "ONNX operators of TensorRT: no indices", _one_output),
    Rule(_ops("AveragePool"), "NvInfer.h 8.5.2:1850", _inclusive, dla="xavier"),
    Rule(ACTIVATION, "page, row Activation", _ranks(4)),
    Rule(_ops("Clip"), "page, row Activation: Clipped ReLU; guide 8.5", _clipped),
    Rule(_ops("PRelu"), f"{H}:3897; page, row Parametric ReLU", _slope),
    Rule(ELEMENTWISE, "page, row ElementWise: 2-D", _ranks(4)),
    Rule(ELEMENTWISE, "guide 8.5, ElementWise: NCHW, NC11, N111", _broadcast),
    Rule(_ops("Sub"), "NvInfer.h 8.0.1:2794; kSUB is in 8.2.1:2833", _never("no kSUB"),
         until=(8, 2)),
    Rule(_ops("Div"), "page, row ElementWise", _dividend),
    Rule(_ops("Pow"), "page, row ElementWise", _power),
    Rule(COMPARISONS, "page, row Comparison", _int8_only),
    Rule(COMPARISONS, "page, row Comparison", _cast_at_once),
    Rule(COMPARISONS, "NvInfer.h 8.5.2:2907", _never("no comparison"), dla="xavier"),
    Rule(_ops("Cast"), "page, row Comparison", _behind_comparison),
    Rule(_ops("LRN"), f"{H}:1714; page, row LRN", _window_of_lrn),
    Rule(_ops("Concat"), f"{H}:2060; page, row Concatenation", _third_to_last),
    Rule(_ops("Concat"), "page, row Concatenation", _two_inputs),
    Rule(CUT, f"{H}:3291", _four_dimensions),
    Rule(CUT, f"{H}:3286 and 3287", _static_slice),
    Rule(CUT, f"{H}:3289", _unit_steps),
    Rule(CUT, f"{H}:3290", _whole_batch),
    Rule(CUT, "guide 8.5, Slice: FP16", lambda layer, build:
         "Slice in INT8" if build.precision == "int8" else None, until=(8, 6)),
    Rule(RESIZE, f"{H}:4099 and 4132", _resize_scales),
    Rule(RESIZE, f"{H}:4077", _resize_mode, since=(8, 4)),
    Rule(RESIZE, "NvInfer.h 8.2.1:4762 to 4892", lambda layer, build:
         None if (_text(layer, "mode") or "nearest") == "nearest" else "not nearest",
         until=(8, 4)),
    Rule(_ops("Softmax"), "NvInfer.h 8.5.2:2321", _never("no softmax"), dla="xavier"),
    Rule(_ops("Softmax"), f"{H}:1986", _softmax_axis),
    Rule(_ops("Softmax"), f"{H}:1988 to 1992", _softmax_size),
    Rule(SHUFFLE, "matrix: Orin, JetPack 5.1.1 and newer", _never("no shuffle"), dla="xavier"),
    Rule(SHUFFLE, "matrix: TensorRT 8.5.2 and newer", _never("no shuffle"), until=(8, 5)),
    Rule(SHUFFLE, "guide 8.5, Shuffle", _ranks(4)),
    Rule(SHUFFLE, "guide 8.5, Shuffle", _batch_stays),
    Rule(_ops("Reshape"), "TensorRT's log", _beside_slice),
    Rule(REDUCE, "matrix: Orin", _never("no reduction"), dla="xavier"),
    Rule(REDUCE, "guide 8.5, Reduce", _ranks(4)),
    Rule(REDUCE, "guide 8.5, Reduce", _reduced),
    Rule(UNARY, f"{H}:2808", _smaller),
)
# fmt: on
