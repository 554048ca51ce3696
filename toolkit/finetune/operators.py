"""ONNX operators as PyTorch functions: one row each, from node and operands to the result.

Operands are tensors, None where an optional one is absent; shapes and axes are tensors, too.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch.nn import functional as f

from device.dla_emulator.float_ops import nearest_indexes
from device.dla_emulator.segment_graph import Node
from device.padding import is_same, same_padding

Operands = Sequence[Any]  # tensors and None
Operator = Callable[[Node, Operands], Any]

_CONVOLUTIONS = {1: f.conv1d, 2: f.conv2d, 3: f.conv3d}
_DECONVOLUTIONS = {1: f.conv_transpose1d, 2: f.conv_transpose2d, 3: f.conv_transpose3d}
_MAXIMA = {1: f.max_pool1d, 2: f.max_pool2d, 3: f.max_pool3d}
_AVERAGES = {1: f.avg_pool1d, 2: f.avg_pool2d, 3: f.avg_pool3d}


def _repeated(node: Node, key: str, rank: int, value: int) -> tuple[int, ...]:
    return node.integers(key, (value,) * rank)


def _margins(node: Node, sizes: Sequence[int], kernel: Sequence[int]) -> list[tuple[int, int]]:
    """Return the padding before and after each spatial axis."""
    rank, auto_pad = len(kernel), node.text("auto_pad", "NOTSET")
    if not is_same(auto_pad):
        pads = _repeated(node, "pads", 2 * rank, 0)
        return list(zip(pads[:rank], pads[rank:], strict=True))
    strides, dilations = _repeated(node, "strides", rank, 1), _repeated(node, "dilations", rank, 1)
    return [
        same_padding(
            sizes[axis],
            -(-sizes[axis] // strides[axis]),
            stride=strides[axis],
            span=(kernel[axis] - 1) * dilations[axis] + 1,
            upper=auto_pad == "SAME_UPPER",
        )
        for axis in range(rank)
    ]


def _padded(x: torch.Tensor, margins: Sequence[tuple[int, int]], fill: float = 0.0) -> torch.Tensor:
    """Return x with margins at its last axes; torch names them from the last one on."""
    if not any(map(any, margins)):
        return x
    return f.pad(x, [count for pair in reversed(margins) for count in pair], value=fill)


def _convolve(node: Node, operands: Operands) -> torch.Tensor:
    x, weight, bias = (*operands, None)[:3]
    rank = weight.ndim - 2
    return _CONVOLUTIONS[rank](
        _padded(x, _margins(node, x.shape[2:], weight.shape[2:])),
        weight,
        bias,
        stride=_repeated(node, "strides", rank, 1),
        dilation=_repeated(node, "dilations", rank, 1),
        groups=node.integer("group", 1),
    )


def _deconvolve(node: Node, operands: Operands) -> torch.Tensor:
    x, weight, bias = (*operands, None)[:3]
    rank = weight.ndim - 2
    if "output_shape" in node.attributes or is_same(node.text("auto_pad", "NOTSET")):
        raise NotImplementedError("output_shape and auto_pad; export it with pads")
    whole = _DECONVOLUTIONS[rank](
        x,
        weight,
        bias,
        stride=_repeated(node, "strides", rank, 1),
        output_padding=_repeated(node, "output_padding", rank, 0),
        groups=node.integer("group", 1),
        dilation=_repeated(node, "dilations", rank, 1),
    )
    margins = _margins(node, (), weight.shape[2:])
    return _padded(whole, [(-before, -after) for before, after in margins])


def _gemm(node: Node, operands: Operands) -> torch.Tensor:
    a, b, c = (*operands, None)[:3]
    product = (a.T if node.integer("transA", 0) else a) @ (b.T if node.integer("transB", 0) else b)
    result = node.number("alpha", 1.0) * product
    return result if c is None else result + node.number("beta", 1.0) * c


def _max_pool(node: Node, operands: Operands) -> torch.Tensor:
    (x,), kernel = operands, node.integers("kernel_shape", ())
    margins, rank = _margins(node, x.shape[2:], kernel), len(kernel)
    ceil_mode = bool(node.integer("ceil_mode", 0))
    if ceil_mode and any(before != after for before, after in margins):
        raise NotImplementedError("ceil_mode with other padding before than after")
    return _MAXIMA[rank](
        # torch leaves out windows that begin in padding that it knows of; it limits that, too.
        x if ceil_mode else _padded(x, margins, -torch.inf),
        kernel,
        _repeated(node, "strides", rank, 1),
        [before for before, _ in margins] if ceil_mode else 0,
        _repeated(node, "dilations", rank, 1),
        ceil_mode,
    )


def _average_pool(node: Node, operands: Operands) -> torch.Tensor:
    (x,), kernel = operands, node.integers("kernel_shape", ())
    margins, rank = _margins(node, x.shape[2:], kernel), len(kernel)
    if any(before != after for before, after in margins):
        raise NotImplementedError("an average with other padding before than after")
    if any(step != 1 for step in _repeated(node, "dilations", rank, 1)):
        raise NotImplementedError("an average with dilations")
    return _AVERAGES[rank](
        x,
        kernel,
        _repeated(node, "strides", rank, 1),
        [before for before, _ in margins],
        bool(node.integer("ceil_mode", 0)),
        bool(node.integer("count_include_pad", 0)),
    )


def _reduced(function: Callable[..., torch.Tensor]) -> Operator:
    def run(node: Node, operands: Operands) -> torch.Tensor:
        x, axes = (*operands, None)[:2]
        named = node.integers("axes", ()) if axes is None else tuple(axes.tolist())
        if not named and node.integer("noop_with_empty_axes", 0):
            return x
        return function(x, named or tuple(range(x.ndim)), keepdim=bool(node.integer("keepdims", 1)))

    return run


def _clip(node: Node, operands: Operands) -> torch.Tensor:
    x, low, high = (*operands, None, None)[:3]
    return torch.clamp(
        x, None if low is None else low.item(), None if high is None else high.item()
    )


def _split(node: Node, operands: Operands) -> tuple[torch.Tensor, ...]:
    x, sizes = (*operands, None)[:2]
    axis, count = node.integer("axis", 0), len(node.outputs)
    parts = -(-x.shape[axis] // count) if sizes is None else sizes.tolist()
    return tuple(torch.split(x, parts, axis))


def _slice(node: Node, operands: Operands) -> torch.Tensor:
    x, starts, ends, axes, steps = (*operands, None, None)[:5]
    named = range(len(starts)) if axes is None else axes.tolist()
    strides = [1] * len(starts) if steps is None else steps.tolist()
    for axis, start, end, step in zip(named, starts.tolist(), ends.tolist(), strides, strict=True):
        positions = range(x.shape[axis])[start:end:step]
        x = torch.index_select(
            x, axis, torch.tensor(list(positions), dtype=torch.int64, device=x.device)
        )
    return x


def _reshape(node: Node, operands: Operands) -> torch.Tensor:
    x, sizes = operands
    keep = not node.integer("allowzero", 0)
    return x.reshape(
        [x.shape[i] if size == 0 and keep else size for i, size in enumerate(sizes.tolist())]
    )


def _flatten(node: Node, operands: Operands) -> torch.Tensor:
    (x,) = operands
    axis = node.integer("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(int(torch.tensor(x.shape[:axis]).prod()), -1)


def _squeeze(node: Node, operands: Operands) -> torch.Tensor:
    x, axes = (*operands, None)[:2]
    return torch.squeeze(x) if axes is None else torch.squeeze(x, tuple(axes.tolist()))


def _unsqueeze(node: Node, operands: Operands) -> torch.Tensor:
    x, axes = operands
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes.tolist()):
        x = x.unsqueeze(axis)
    return x


def _gather(node: Node, operands: Operands) -> torch.Tensor:
    x, indices = operands
    axis = node.integer("axis", 0) % x.ndim
    picked = torch.index_select(x, axis, (indices % x.shape[axis]).reshape(-1))
    return picked.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


def _resize(node: Node, operands: Operands) -> torch.Tensor:
    x, _, scales, sizes = (*operands, None, None)[:4]
    factors = (
        [size / length for size, length in zip(sizes.tolist(), x.shape, strict=True)]
        if sizes is not None
        else scales.tolist()
    )
    exact = [length * factor for length, factor in zip(x.shape, factors, strict=True)]
    lengths = [int(length) for length in exact]
    if sizes is not None:
        lengths = sizes.tolist()
    if node.text("mode", "nearest") == "nearest":
        for axis, (length, factor) in enumerate(zip(lengths, factors, strict=True)):
            at = torch.from_numpy(nearest_indexes(node, x.shape[axis], length, factor))
            x = torch.index_select(x, axis, at.to(x.device))
        return x
    _check_linear(node, x.shape, exact)
    corners = node.text("coordinate_transformation_mode", "half_pixel") == "align_corners"
    mode = {3: "linear", 4: "bilinear", 5: "trilinear"}[x.ndim]
    return f.interpolate(x, lengths[2:], mode=mode, align_corners=corners)


def _check_linear(node: Node, shape: Sequence[int], lengths: Sequence[float]) -> None:
    """Raise NotImplementedError where `interpolate` computes something else than ONNX."""
    mode = node.text("mode", "nearest")
    coordinates = node.text("coordinate_transformation_mode", "half_pixel")
    known = ["align_corners", "half_pixel", "half_pixel_symmetric"]
    if all(length > 1 for length in lengths[2:]):
        known.append("pytorch_half_pixel")
    if mode != "linear" or coordinates not in known:
        raise NotImplementedError(f"resizing by {coordinates}, {mode}")
    if node.integer("antialias", 0):
        raise NotImplementedError("resizing with antialias")
    if tuple(lengths[:2]) != tuple(shape[:2]) or any(length % 1 for length in lengths):
        raise NotImplementedError(f"resizing {list(shape)} to {list(lengths)}")


def _layer_norm(node: Node, operands: Operands) -> torch.Tensor:
    x, weight, bias = (*operands, None)[:3]
    shape = x.shape[node.integer("axis", -1) % x.ndim :]
    bias = None if bias is None else bias.expand(shape)
    return f.layer_norm(x, shape, weight.expand(shape), bias, node.number("epsilon", 1e-5))


def _batch_norm(node: Node, operands: Operands) -> torch.Tensor:
    x, gamma, beta, mean, variance = operands
    if node.integer("training_mode", 0):
        raise NotImplementedError("training_mode; export the network for inference")
    return f.batch_norm(x, mean, variance, gamma, beta, eps=node.number("epsilon", 1e-5))


def _prelu(node: Node, operands: Operands) -> torch.Tensor:
    x, slopes = operands
    return torch.where(x < 0, x * slopes, x)


def _folded(function: Callable[..., torch.Tensor]) -> Operator:
    """A function of two tensors on any number of operands."""
    return lambda node, operands: reduce(function, operands)


def _plain(function: Callable[..., torch.Tensor]) -> Operator:
    """A function of the operands alone."""
    return lambda node, operands: function(*operands)


OPERATORS: Mapping[str, Operator] = {
    "Abs": _plain(torch.abs),
    "Add": _plain(torch.add),
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Clip": _clip,
    "Concat": lambda node, operands: torch.cat(list(operands), node.integer("axis", 0)),
    "Conv": _convolve,
    "ConvTranspose": _deconvolve,
    "Div": _plain(torch.div),
    "Erf": _plain(torch.erf),
    "Exp": _plain(torch.exp),
    "Flatten": _flatten,
    "Gather": _gather,
    "Gelu": lambda node, x: f.gelu(x[0], approximate=node.text("approximate", "none")),
    "Gemm": _gemm,
    "GlobalAveragePool": lambda node, x: x[0].mean(tuple(range(2, x[0].ndim)), keepdim=True),
    "GlobalMaxPool": lambda node, x: x[0].amax(tuple(range(2, x[0].ndim)), keepdim=True),
    "HardSigmoid": lambda node, x: torch.clamp(
        x[0] * node.number("alpha", 0.2) + node.number("beta", 0.5), 0, 1
    ),
    "HardSwish": _plain(f.hardswish),
    "Identity": _plain(torch.clone),
    "LayerNormalization": _layer_norm,
    "LeakyRelu": lambda node, x: f.leaky_relu(x[0], node.number("alpha", 0.01)),
    "MatMul": _plain(torch.matmul),
    "Max": _folded(torch.maximum),
    "MaxPool": _max_pool,
    "Min": _folded(torch.minimum),
    "Mul": _plain(torch.mul),
    "Neg": _plain(torch.neg),
    "PRelu": _prelu,
    "Pow": _plain(torch.pow),
    "ReduceMax": _reduced(torch.amax),
    "ReduceMean": _reduced(torch.mean),
    "ReduceSum": _reduced(torch.sum),
    "Relu": _plain(torch.relu),
    "Reshape": _reshape,
    "Resize": _resize,
    "Sigmoid": _plain(torch.sigmoid),
    "Slice": _slice,
    "Softmax": lambda node, x: torch.softmax(x[0], node.integer("axis", -1)),
    "Split": _split,
    "Sqrt": _plain(torch.sqrt),
    "Squeeze": _squeeze,
    "Sub": _plain(torch.sub),
    "Sum": lambda node, operands: sum(operands[1:], operands[0]),
    "Tanh": _plain(torch.tanh),
    "Transpose": lambda node, x: x[0].permute(
        node.integers("perm", tuple(reversed(range(x[0].ndim))))
    ),
    "Unsqueeze": _unsqueeze,
}
