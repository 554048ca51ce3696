"""Bias correction: subtract the mean INT8 error of each output channel from its bias.

A layer computes y = W x + b in floating point and y~ = W~ x~ + b in INT8, where W~ and x~ are
rounded and clipped. Over samples and positions, for each output channel c,

    e_c = E[y~_c - y_c],      b'_c = b_c - e_c

and then E[y~'_c] = E[y_c]: the remaining noise has zero mean. Both means are measured; nothing is
assumed about the distribution of x. (Nagel et al. 2019, section 4.2, with data.)
e_c is the interquartile mean over samples: clipping gives a few samples a large error at a few
positions, which must not shift all others. On EfficientNet-B0 with 99.99 percent of all values
within the ranges, 16 unseen images had 10.7 dB without correction, 11.8 with the mean over all
samples, and 15.0 with the median.

The input of a layer changes with the biases before it. So layers are corrected in graph order, each
measured after those already corrected; independent layers are corrected together. The graph between
two such groups runs on its own, from the stored activations of each sample, so that each sample
passes the network once. Measuring all layers at once would count an offset again in every later
layer: on a small detector (INT8 by entropy, 16 held-out images) that took the boxes from 28.0 dB
to 26.7, and to 13.5 when repeated three times, while layer by layer they reached 29.0.

A mean over all positions says little about rare ones: on the same detector the scores, nearly all
background, fell from 24.2 dB to 20.9. So `corrections.try_bias_correction` measures every output on
other samples and keeps the correction only if it helps.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from toolkit.errors import BuildError
from toolkit.graph.constant_weights import as_float32, set_constant
from toolkit.graph.extract import values_read
from toolkit.quantize.corrections.channel_links import Refusal
from toolkit.quantize.weights import constant_of

Sample = Mapping[str, NDArray[Any]]
Run = Callable[[Sample], Mapping[str, NDArray[Any]]]
"""Inputs of one sample -> (at least) the requested tensors."""
OpenRun = Callable[[ir.Model, Sequence[str]], Run]
"""A float model and the tensors to read -> a function that runs it, in float or in INT8."""


@dataclass(frozen=True, slots=True, eq=False)
class BiasLayer:
    """A layer whose bias can be corrected.

    `tensor` is y and `axis` its channel axis; operand `index` of `node` is the bias, or would be,
    and it enters y times `factor`. `channels` is the length of the bias.
    """

    node: ir.Node
    tensor: str
    axis: int
    index: int
    channels: int
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class CorrectedBias:
    """A corrected layer; `largest`: its largest |bias change|, in the unit of y."""

    node: str
    tensor: str
    largest: float


@dataclass(frozen=True, slots=True)
class Corrected:
    """The corrected copy of the model, the changes, and the layers without a bias to correct.

    `changes`: node -> values added to its bias, [channels]; `change_biases` applies them again.
    """

    model: ir.Model
    changes: Mapping[str, tuple[float, ...]]
    layers: tuple[CorrectedBias, ...]
    refusals: tuple[Refusal, ...]


def correct_biases(
    model: ir.Model,
    samples: Sequence[Sample],
    open_float: OpenRun,
    open_int8: OpenRun,
    on_progress: Callable[[int, int], None] | None = None,
) -> Corrected:
    """Return a copy of the model whose channel means in INT8 equal those in floating point.

    `open_int8` quantizes the subgraph that it gets, always with the same ranges: one subgraph for
    each depth of layers. Activations between subgraphs stay in memory for all samples.
    `on_progress` is called with (depths done, depths).
    """
    changed = model.clone()
    layers, refusals = find_bias_layers(changed.graph)
    axes = {layer.tensor: layer.axis for layer in layers}
    if not layers:
        return Corrected(changed, {}, (), refusals)
    float_means = channel_means(open_float(model, tuple(axes)), samples, axes)
    changes: dict[str, tuple[float, ...]] = {}
    states: list[dict[str, NDArray[Any]]] = [dict(sample) for sample in samples]
    subgraphs = _subgraphs(changed, layers)
    for number, subgraph in enumerate(subgraphs):
        run = open_int8(_cut(changed, states[0], subgraph.outputs), subgraph.outputs)
        int8_means = _advance(run, states, subgraph)
        for layer in subgraph.layers:
            error = _interquartile_mean(int8_means[layer.tensor] - float_means[layer.tensor])
            name = str(layer.node.name)
            changes[name] = tuple((-error / layer.factor).tolist())
            _add(changed.graph, layer, changes[name])
            _subtract(states, layer, error)
        if on_progress is not None:
            on_progress(number + 1, len(subgraphs))
    corrected = tuple(
        CorrectedBias(name, layer.tensor, layer.factor * float(np.abs(changes[name]).max()))
        for layer in layers
        for name in (str(layer.node.name),)
    )
    return Corrected(changed, changes, corrected, refusals)


def change_biases(model: ir.Model, changes: Mapping[str, Sequence[float]]) -> ir.Model:
    """Return a copy of the model with numbers added to the biases of nodes, [channels] each.

    Raises BuildError: a node has no bias to correct, or another number of channels.
    """
    changed = model.clone()
    layers = {str(layer.node.name): layer for layer in find_bias_layers(changed.graph)[0]}
    for name, change in changes.items():
        if name not in layers:
            raise BuildError(
                f"The bias of node {name!r} is to be corrected, but this model has no such node "
                f"among the {len(layers)} whose bias can be; calibrate this model again."
            )
        if len(change) != layers[name].channels:
            raise BuildError(
                f"Node {name!r} has {layers[name].channels} output channels, but {len(change)} "
                "changes of its bias are given; calibrate this model again."
            )
        _add(changed.graph, layers[name], change)
    return changed


def channel_means(
    run: Run, samples: Sequence[Sample], axes: Mapping[str, int]
) -> dict[str, NDArray[np.float64]]:
    """The mean of every channel of each tensor over positions, [samples, channels].

    `axes`: tensor -> channel axis.

    Raises BuildError: there are no samples, or a mean is not finite.
    """
    if not samples:
        raise BuildError("Bias correction was given no samples; give at least one.")
    means_of: dict[str, list[NDArray[np.float64]]] = {name: [] for name in axes}
    for sample in samples:
        outputs = run(sample)
        for name, axis in axes.items():
            means_of[name].append(_mean_of(outputs[name], axis))
    means = {name: np.array(rows) for name, rows in means_of.items()}
    for name, mean in means.items():
        _refuse_not_finite(name, mean)
    return means


def _mean_of(array: NDArray[Any], axis: int) -> NDArray[np.float64]:
    reduced_axes = tuple(i for i in range(array.ndim) if i != axis % array.ndim)
    mean: NDArray[np.float64] = array.mean(axis=reduced_axes, dtype=np.float64)
    return mean


def _refuse_not_finite(name: str, means: NDArray[np.float64]) -> None:
    if not np.isfinite(means).all():
        raise BuildError(
            f"Tensor {name!r} has no finite mean in {len(means)} samples (channel "
            f"{int(np.argmin(np.isfinite(means).all(axis=0)))}); find the samples with NaN or Inf."
        )


def _interquartile_mean(errors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Interquartile mean over samples: [samples, channels] -> [channels]."""
    cut = len(errors) // 4
    mean: NDArray[np.float64] = np.sort(errors, axis=0)[cut : len(errors) - cut].mean(axis=0)
    return mean


def find_bias_layers(graph: ir.Graph) -> tuple[tuple[BiasLayer, ...], tuple[Refusal, ...]]:
    """Return the layers whose bias can be corrected, in graph order, and why others cannot.

    A Conv or Gemm without bias gets one; a MatMul needs the Add that follows it.
    """
    find_layer: Mapping[str, Callable[[ir.Node], BiasLayer | str]] = {
        "Conv": _of_conv,
        "ConvTranspose": _of_conv,
        "Gemm": _of_gemm,
        "MatMul": _of_matmul,
    }
    layers, refusals = [], []
    for node in graph:
        if node.op_type not in find_layer or node.domain != "":
            continue
        layer = find_layer[node.op_type](node)
        if isinstance(layer, BiasLayer):
            layers.append(layer)
        else:
            refusals.append(Refusal(str(node.name), layer))
    return tuple(layers), tuple(refusals)


@dataclass(frozen=True, slots=True)
class _Subgraph:
    """The subgraph after the layers of one depth, up to and including those of the next.

    `outputs`: tensors to compute. `later`: all tensors that later subgraphs read.
    """

    layers: tuple[BiasLayer, ...]
    outputs: tuple[str, ...]
    later: frozenset[str]


def _subgraphs(model: ir.Model, layers: Sequence[BiasLayer]) -> tuple[_Subgraph, ...]:
    """Group layers by depth: the number of layers on the longest path to them."""
    layer_of = {layer.tensor: layer for layer in layers}
    depth: dict[ir.Node, int] = {}
    subgraph_of: dict[ir.Node, int] = {}
    groups: dict[int, list[BiasLayer]] = {}
    for node in model.graph:
        producers = [value.producer() for value in values_read(node)]
        layers_before = max(
            (depth[producer] for producer in producers if producer is not None), default=0
        )
        own_layers = [layer_of[str(value.name)] for value in node.outputs if value.name in layer_of]
        depth[node] = layers_before + bool(own_layers)
        # Nodes after the layers of a depth run with the next depth.
        subgraph_of[node] = depth[node] + (not own_layers)
        for layer in own_layers:
            groups.setdefault(depth[node], []).append(layer)
    last_reader: dict[str, int] = {}  # the last piece that reads a tensor
    for node, number in subgraph_of.items():
        for value in values_read(node):
            last_reader[str(value.name)] = max(last_reader.get(str(value.name), 0), number)
    subgraphs = []
    for number in sorted(groups):
        later = frozenset(
            name for name, reader in last_reader.items() if number < reader <= max(groups)
        )
        outputs = tuple(
            str(value.name)
            for node, index in subgraph_of.items()
            for value in node.outputs
            if index == number and (value.name in layer_of or value.name in later)
        )
        subgraphs.append(_Subgraph(tuple(groups[number]), outputs, later))
    return tuple(subgraphs)


def _cut(model: ir.Model, known: Collection[str], outputs: Sequence[str]) -> ir.Model:
    """Extract the subgraph that computes `outputs` from the known tensors."""
    graph = ir.convenience.extract(model.graph, sorted(known), outputs)
    functions = list(model.functions.values())
    return ir.Model(graph, ir_version=model.ir_version, functions=functions)


def _advance(
    run: Run, states: Sequence[dict[str, NDArray[Any]]], subgraph: _Subgraph
) -> dict[str, NDArray[np.float64]]:
    """Run a subgraph on each state, keep what later ones read; return the means of its layers."""
    means_of: dict[str, list[NDArray[np.float64]]] = {layer.tensor: [] for layer in subgraph.layers}
    for state in states:
        outputs = run(state)
        for layer in subgraph.layers:
            means_of[layer.tensor].append(_mean_of(outputs[layer.tensor], layer.axis))
        for name in state.keys() - subgraph.later:
            del state[name]
        state.update({name: outputs[name] for name in subgraph.outputs if name in subgraph.later})
    return {name: np.array(means) for name, means in means_of.items()}


def _subtract(
    states: Sequence[dict[str, NDArray[Any]]], layer: BiasLayer, error: NDArray[np.float64]
) -> None:
    """Apply the changed bias to the stored output of a layer."""
    for state in states:
        if layer.tensor in state:
            array = state[layer.tensor]
            shape = [1] * array.ndim
            shape[layer.axis] = -1
            state[layer.tensor] = array - error.reshape(shape).astype(array.dtype)


def _add(graph: ir.Graph, layer: BiasLayer, change: Sequence[float]) -> None:
    bias = constant_of(layer.node, layer.index)
    current = np.zeros(layer.channels) if bias is None else np.asarray(bias, np.float64)
    if current.size == 1 and layer.channels > 1:
        current = np.full(layer.channels, current.item())
    shape = current.shape if current.size == layer.channels else (layer.channels,)
    corrected = current.reshape(-1) + np.asarray(change, np.float64)
    name = f"{layer.node.name}_bias_corrected"
    set_constant(graph, layer.node, layer.index, as_float32(corrected.reshape(shape)), name)


def _of_conv(node: ir.Node) -> BiasLayer | str:
    weight = constant_of(node, 1)
    if weight is None:
        return "its weight is not a float32 constant"
    if _is_computed(node, 2):
        return "its bias is not a float32 constant"
    groups = node.attributes.get_int("group", 1)
    channels = weight.shape[0] if node.op_type == "Conv" else weight.shape[1] * groups
    return BiasLayer(node, str(node.outputs[0].name), 1, 2, channels)


def _of_gemm(node: ir.Node) -> BiasLayer | str:
    weight, bias = constant_of(node, 1), constant_of(node, 2)
    beta = node.attributes.get_float("beta", 1.0)
    if weight is None:
        return "its weight is not a float32 constant"
    channels = weight.shape[0 if node.attributes.get_int("transB", 0) else 1]
    if _is_computed(node, 2) or beta == 0.0:
        return "its bias is not a float32 constant that counts"
    if bias is not None and bias.size != 1 and bias.shape not in {(channels,), (1, channels)}:
        return f"its bias of shape {list(bias.shape)} is not one number for each output channel"
    return BiasLayer(node, str(node.outputs[0].name), 1, 2, channels, beta)


def _of_matmul(node: ir.Node) -> BiasLayer | str:
    weight = constant_of(node, 1)
    if weight is None or weight.ndim != 2:
        return "its second operand is not a constant matrix"
    uses = list(node.outputs[0].uses())
    if len(uses) != 1 or uses[0].node.op_type != "Add" or node.outputs[0].is_graph_output():
        return "no Add of a bias follows it"
    add, index = uses[0].node, 1 - uses[0].idx
    bias = constant_of(add, index)
    channels = weight.shape[1]
    if bias is None or bias.shape != (*(1,) * (bias.ndim - 1), channels):
        return "the Add that follows it does not add one constant to each output channel"
    return BiasLayer(add, str(add.outputs[0].name), -1, index, channels)


def _is_computed(node: ir.Node, index: int) -> bool:
    """True if an operand is present but not a float32 constant."""
    present = index < len(node.inputs) and node.inputs[index] is not None
    return present and constant_of(node, index) is None
