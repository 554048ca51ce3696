"""Cross-layer equalisation: rescale channels between layers so that INT8 suits all of them.

For y = W2 f(W1 x + b1) + b2 with f(s z) = s f(z), any positive s per channel leaves y unchanged:

    W1'[i] = W1[i] / s_i,   b1'[i] = b1[i] / s_i,   W2'[:, i] = W2[:, i] s_i

(Nagel et al. 2019, Data-Free Quantization Through Weight Equalization and Bias Correction). Weights
are quantized per channel, so the range of W1[i] does not matter, and activations are evened: with
a_i = max|f(..)_i| as observed, r2_i = max|W2[:, i]| over the rows of W2 divided by their maxima,

    s_i = a_i            into a depthwise layer: all channels then use all of the INT8 range
    s_i = sqrt(a_i / r2_i)   into any other: halfway between the activations' and the weights' need

up to a common factor, taken so that the geometric mean of s is 1. Where several layers write and
read the same channels (`channel_groups`), s_i is the geometric mean of what the readers ask for.

A Clip(0, u) commutes only if it clips nothing. Channels observed within 0.9 u are scaled as far as
they stay within it; the others keep s_i = 1, and so do all without observation. So with a Clip, and
only then, outputs may differ on data outside the observed range. Other results change by float
rounding only. Ranges of activations change: calibrate afterwards.

Where no chain ends at a depthwise layer, and it alone reads a computed tensor (of HardSwish, SiLU,
Add, ..), a Mul by 1 / a_i is put before it: one more operation, where channels differ enough to pay
it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from toolkit.errors import BuildError
from toolkit.graph.constant_weights import as_float32, free_name, set_constant
from toolkit.quantize.corrections.channel_groups import FIXED, ChannelGroups, find_groups
from toolkit.quantize.corrections.channel_links import (
    Link,
    find_links,
    is_depthwise,
    unlinked_depthwise,
)
from toolkit.quantize.weights import constant_of

Ranges = Mapping[str, NDArray[Any]]
"""Tensor -> max|x| of each channel, [channels]."""
Vector = NDArray[np.float64]

CLIP_HEADROOM = 0.9
# A channel beyond three decades is effectively switched off, and its bias would grow with s.
LARGEST_SCALE = 1000.0
LEAST_SPREAD = 2.0
"""The widest channel in geometric means of all channels from which on a Mul is put in."""


@dataclass(frozen=True, slots=True)
class Equalised:
    """The rescaled copy of the model.

    `factors`: tensor -> its divisors, [channels]; `scale_channels` applies them again.
    """

    model: ir.Model
    factors: Mapping[str, Vector]


def link_tensors(model: ir.Model) -> tuple[str, ...]:
    """The activations whose channel ranges `equalise` uses."""
    links, _ = find_links(model.graph)
    names = [name for link in links for name in (link.tensor, link.clipped) if name is not None]
    read = map(_operand, find_groups(model.graph).readers)
    return tuple(dict.fromkeys((*names, *unlinked_depthwise(model.graph), *read)))


def channel_ranges(
    run: Callable[[Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]],
    samples: Iterable[Mapping[str, NDArray[Any]]],
    tensors: Sequence[str],
) -> dict[str, NDArray[Any]]:
    """max|x| of each channel (axis 1) of each tensor over all samples."""
    ranges: dict[str, NDArray[Any]] = {}
    for sample in samples:
        outputs = run(sample)
        for name in tensors:
            magnitude = np.abs(outputs[name])
            observed = magnitude.max(
                axis=tuple(axis for axis in range(magnitude.ndim) if axis != 1)
            )
            ranges[name] = np.maximum(ranges[name], observed) if name in ranges else observed
    return ranges


def equalise(model: ir.Model, observed: Ranges) -> Equalised:
    """Return an equalised copy of the model.

    `observed` holds the ranges of `link_tensors`; links that have none stay as they are.
    """
    factors: dict[str, Vector] = {}
    for link in find_links(model.graph)[0]:
        if _is_usable(link, observed):
            factors[link.tensor] = _within_clip(link, _range_scale(link, observed), observed)
    factors |= _group_scales(model, observed)
    factors |= _unlinked_scales(model, observed)
    return Equalised(scale_channels(model, factors), factors)


def _group_scales(model: ir.Model, ranges: Ranges) -> dict[str, Vector]:
    """Result of a convolution -> factors of its channels that belong to groups, [channels].

    The factor of a group is the geometric mean of what each of its readers asks for.
    """
    groups = find_groups(model.graph)
    count = 1 + max((int(ids.max()) for ids in groups.producers.values()), default=FIXED)
    logs, readers = np.zeros(count), np.zeros(count)
    for node, ids in groups.readers.items():
        observed = ranges.get(_operand(node))
        if observed is None:
            continue
        factors = observed.astype(np.float64)
        if not is_depthwise(node):
            weights = _input_ranges(node, relative=True)
            ratio = np.divide(factors, weights, where=weights > 0, out=factors * 0.0)
            factors = np.sqrt(ratio)
        free = (ids != FIXED) & (factors > 0) & np.isfinite(factors)
        if free.any():
            log = np.log(factors[free])
            np.add.at(logs, ids[free], log - log.mean())
            np.add.at(readers, ids[free], 1.0)
    scale = _limited(np.exp(logs / np.maximum(readers, 1.0)), readers > 0)
    return {str(node.outputs[0].name): scale[ids] for node, ids in groups.producers.items()}


def _unlinked_scales(model: ir.Model, ranges: Ranges) -> dict[str, Vector]:
    """Tensor -> factors by which a Mul divides it, where they differ enough."""
    grouped = find_groups(model.graph).readers
    unlinked = unlinked_depthwise(model.graph).items()
    observed = (name for name, node in unlinked if name in ranges and node not in grouped)
    scales = {name: _evening(ranges[name]) for name in observed}
    return {name: scale for name, scale in scales.items() if scale.max() >= LEAST_SPREAD}


def scale_channels(model: ir.Model, factors: Mapping[str, NDArray[Any]]) -> ir.Model:
    """Return a copy of the model with tensors divided by factors, [channels].

    Tensors of links are divided by the weights of their producer, others by a Mul before their
    depthwise layer.

    Raises BuildError: a tensor is neither in this model, or has another number of channels.
    """
    changed = model.clone()
    links = {link.tensor: link for link in find_links(changed.graph)[0]}
    unlinked, groups = unlinked_depthwise(changed.graph), find_groups(changed.graph)
    grouped = {str(node.outputs[0].name): node for node in groups.producers}
    producers = {name: link.producer for name, link in links.items()} | unlinked | grouped
    for name, scale in factors.items():
        if name not in producers:
            raise BuildError(
                f"Tensor {name!r} is to be equalised, but is none of the "
                f"{len(producers)} tensors of this model that hand channels from layer "
                "to layer; calibrate this model again."
            )
        channels = _weight(producers[name]).shape[0]
        if len(scale) != channels:
            raise BuildError(
                f"Tensor {name!r} has {channels} channels, but {len(scale)} factors equalise it; "
                "calibrate this model again."
            )
    # In graph order: the order of two factors changes the last bit.
    for name, link in links.items():
        if name in factors:
            scale = np.asarray(factors[name], np.float64)
            _divide_outputs(changed.graph, link.producer, scale)
            _multiply_inputs(changed.graph, link.consumer, scale)
    rows = {name: np.asarray(row, np.float64) for name, row in factors.items()}
    _scale_groups(changed.graph, groups, rows)
    for name, node in unlinked.items():
        if name in factors:
            _divide_before(changed.graph, node, np.asarray(factors[name], np.float64))
    return changed


def _scale_groups(graph: ir.Graph, groups: ChannelGroups, rows: Mapping[str, Vector]) -> None:
    """Divide the outputs of each convolution by its factors; multiply the inputs of the readers."""
    named = {str(node.outputs[0].name): ids for node, ids in groups.producers.items()}
    scale = np.ones(1 + max((int(ids.max()) for ids in named.values()), default=FIXED))
    for name, ids in named.items():
        if name in rows:
            scale[ids] = rows[name]
    scale[FIXED] = 1.0
    for name, ids in named.items():
        if not np.array_equal(scale[ids], rows.get(name, np.ones(len(ids)))):
            raise BuildError(
                f"Tensor {name!r} has channels that other tensors share, but their factors differ; "
                "calibrate this model again."
            )
    for node, ids in groups.producers.items():
        if (scale[ids] != 1.0).any():
            _divide_outputs(graph, node, scale[ids])
    for node, ids in groups.readers.items():
        if (scale[ids] != 1.0).any():
            _multiply_inputs(graph, node, scale[ids])


def _divide_before(graph: ir.Graph, node: ir.Node, scale: Vector) -> None:
    """Put a Mul by 1 / `scale` before a depthwise layer; multiply the layer's inputs."""
    value = node.inputs[0]
    assert value is not None  # unlinked_depthwise takes only such nodes
    # The same name in every build: the table holds the range of the result.
    weight, name = _weight(node), free_name(graph, f"{value.name}_equalised")
    result = ir.Value(name=name, shape=value.shape, type=value.type)
    divide = ir.Node("", "Mul", [value], outputs=[result], name=name)
    graph.insert_before(node, divide)
    across = (1, -1, *(1,) * (weight.ndim - 2))
    set_constant(graph, divide, 1, as_float32((1.0 / scale).reshape(across)), f"{name}_factors")
    node.replace_input_with(0, result)
    _multiply_inputs(graph, node, scale)


def _is_usable(link: Link, ranges: Ranges) -> bool:
    """Whether its channels were observed, and a Clip lets some pass."""
    if {link.tensor, link.clipped} - {None, *ranges}:
        return False
    if link.clipped is None or link.limit is None:
        return True
    return bool((ranges[link.clipped] < CLIP_HEADROOM * link.limit).any())


def _range_scale(link: Link, ranges: Ranges) -> Vector:
    """Factors from observed activations, [channels]."""
    observed = ranges[link.tensor].astype(np.float64)
    if is_depthwise(link.consumer):
        return _evening(observed)
    weight_ranges = _input_ranges(link.consumer, relative=True)
    ratio = np.divide(observed, weight_ranges, where=weight_ranges > 0, out=observed * 0.0)
    return _evening(np.sqrt(ratio))


def _evening(ranges: NDArray[Any]) -> Vector:
    """Factors with the ratios of `ranges` and a geometric mean of 1, [channels]; of zeros 1."""
    alive = (ranges > 0) & np.isfinite(ranges)
    log = np.log(np.where(alive, ranges, 1.0).astype(np.float64))
    centre = log[alive].mean() if alive.any() else 0.0
    return _limited(np.exp(log - centre), alive)


def _limited(scale: Vector, alive: NDArray[np.bool_]) -> Vector:
    return np.where(alive, np.clip(scale, 1 / LARGEST_SCALE, LARGEST_SCALE), 1.0)


def _within_clip(link: Link, scale: Vector, ranges: Ranges) -> Vector:
    """Raise factors so that no clipped channel exceeds its headroom."""
    if link.clipped is None or link.limit is None:
        return scale
    observed, bound = ranges[link.clipped].astype(np.float64), CLIP_HEADROOM * link.limit
    return np.where(observed >= bound, 1.0, np.maximum(scale, observed / bound))


def _divide_outputs(graph: ir.Graph, node: ir.Node, scale: Vector) -> None:
    weight = _weight(node)
    across = (slice(None),) + (None,) * (weight.ndim - 1)
    _set_weight(graph, node, weight / scale[across])
    bias = constant_of(node, 2)
    if bias is not None:
        _set(graph, node, 2, bias / scale)


def _multiply_inputs(graph: ir.Graph, node: ir.Node, scale: Vector) -> None:
    weight = _weight(node)
    _set_weight(graph, node, weight * _of_inputs(node, weight, scale))


def _operand(node: ir.Node) -> str:
    """The tensor that a layer reads."""
    value = node.inputs[0]
    assert value is not None  # find_groups takes only such nodes
    return str(value.name)


def _set_weight(graph: ir.Graph, node: ir.Node, weight: NDArray[Any]) -> None:
    _set(graph, node, 1, weight.T if _is_stored_by_inputs(node) else weight)


def _set(graph: ir.Graph, node: ir.Node, index: int, array: NDArray[Any]) -> None:
    operand = node.inputs[index]
    assert operand is not None  # it was read from there
    set_constant(graph, node, index, as_float32(array), f"{operand.name}_equalised")


def _of_inputs(node: ir.Node, weight: NDArray[Any], scale: Vector) -> NDArray[Any]:
    """Factors per input channel in the shape of a grouped weight, [out, in / groups, 1, ..].

    Output o lies in group g = o // (out / groups) and reads the inputs g in/groups + k.
    """
    groups = node.attributes.get_int("group", 1)
    per_output = np.repeat(scale.reshape(groups, -1), weight.shape[0] // groups, axis=0)
    return per_output.reshape(*weight.shape[:2], *(1,) * (weight.ndim - 2))


def _input_ranges(node: ir.Node, *, relative: bool = False) -> Vector:
    """max|W| per input channel, [in]; `relative`: each output channel by its maximum first."""
    weight = np.abs(_weight(node)).astype(np.float64)
    taps = weight.max(axis=tuple(range(2, weight.ndim)))
    if relative:
        top = taps.max(axis=1, keepdims=True)
        taps = taps / np.where(top > 0, top, 1.0)
    groups = node.attributes.get_int("group", 1)
    grouped = taps.reshape(groups, -1, taps.shape[1]).max(axis=1)
    ranges: Vector = grouped.reshape(-1)
    return ranges


def _weight(node: ir.Node) -> NDArray[Any]:
    """The weight as a convolution has it, [out, in / groups, ..]."""
    weight = constant_of(node, 1)
    assert weight is not None  # find_links takes only such nodes
    return weight.T if _is_stored_by_inputs(node) else weight


def _is_stored_by_inputs(node: ir.Node) -> bool:
    return node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 0
