"""The network of an engine with a DLA, as a GPU alone would run it with the same ranges.

A DLA writes INT8: what leaves it is rounded, and clipped by its range. A GPU rounds what its INT8
operations read (`toolkit.quantize.gpu_operands`), and hands on the rest in floating point: Q and DQ
that stand in the engine only because a tensor leaves the DLA, or is fused otherwise there, are not
in this graph. Where the DLA clips such a tensor, the graph has a Clip whose bounds are inputs, so
that one session tells what clipping costs and which tensor it is.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from calibration.table import scale_of
from toolkit.export.joined_network import Network
from toolkit.quantize.gpu_operands import operands_on_gpu, tied_on_gpu
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.quantize import quantize
from toolkit.quantize.scales.rules import unify_scales

Array = NDArray[Any]
Arrays = dict[str, Array]
STORED = (-128, 127)
_UNBOUNDED = (np.array(-np.inf, np.float32), np.array(np.inf, np.float32))


def int8_on_gpu(network: Network, ranges: Mapping[str, float]) -> ir.Model:
    """Return the Q/DQ graph of a network that is all on a GPU, as a build would make it.

    Raises BuildError: a tensor that an INT8 operation reads has no range.
    """
    names = [str(node.name) for node in network.model.graph]
    keep = frozenset(network.float_nodes)
    tied = tied_on_gpu(network.model, names, keep)
    amax = unify_scales(network.model, ranges, tied).amax
    operands = operands_on_gpu(network.model, names, keep, amax)
    on_gpu = dict.fromkeys(names, "gpu")
    return quantize(
        network.model, amax, on_gpu, frozenset(), keep_float=keep, operands=operands
    ).model


class GpuNetwork:
    """A network in INT8 as on a GPU, in onnxruntime, every tensor by its name."""

    def __init__(
        self, network: Network, ranges: Mapping[str, float], on_dla: Collection[str] = ()
    ) -> None:
        """Take `ranges` by tensor; `on_dla`: the tensors that the DLA writes in INT8.

        Raises BuildError: a tensor that an INT8 operation reads has no range.
        """
        model = int8_on_gpu(network, ranges)
        tensors = {str(v.name) for v in network.model.graph.inputs}
        tensors |= {str(v.name) for node in network.model.graph for v in node.outputs}
        computed = {str(v.name): v for node in model.graph for v in node.outputs}
        known = {**{str(v.name): v for v in model.graph.inputs}, **computed}
        self._stored = {
            name: _stored(value)
            for name, value in known.items()
            if name in tensors and value.dtype == ir.DataType.FLOAT
        }
        self.scales = {
            name: scale_of(ranges[name])
            for name in sorted(on_dla)
            if name in ranges and name in computed and self._stored.get(name) == name
        }
        for name in self.scales:
            _add_clip(model.graph, computed[name])
        self.outputs = tuple(str(value.name) for value in model.graph.outputs)
        observed = sorted({*self._stored.values(), *self.outputs})
        self._runner = ActivationRunner(model, observed)

    def run(self, feeds: Mapping[str, Array], clipped: Collection[str] = ()) -> Arrays:
        """Return all tensors as they are stored, with some of `scales` clipped by their ranges."""
        bounds: Arrays = {}
        for name, scale in self.scales.items():
            low, high = _UNBOUNDED
            if name in clipped:
                low, high = (np.array(steps * scale, np.float32) for steps in STORED)
            bounds |= {_low(name): low, _high(name): high}
        values = self._runner({**feeds, **bounds})
        by_tensor = {name: values[stored] for name, stored in self._stored.items()}
        return {**by_tensor, **{name: values[name] for name in self.outputs}}


def _stored(value: ir.Value) -> str:
    """Return the tensor that holds a value as its readers see it: behind Q and DQ, or itself."""
    readers = [use.node for use in value.uses()]
    if value.is_graph_output() or not readers:
        return str(value.name)
    if any(node.op_type != "QuantizeLinear" for node in readers):
        return str(value.name)
    (restored,) = (use.node for use in readers[0].outputs[0].uses())
    return str(restored.outputs[0].name)


def _add_clip(graph: ir.Graph, value: ir.Value) -> None:
    """Clip a value for all its readers; an output of the network keeps its name."""
    name = str(value.name)
    bounds = [
        ir.Value(name=bound, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.FLOAT))
        for bound in (_low(name), _high(name))
    ]
    graph.inputs.extend(bounds)
    readers = list(value.uses())
    clip = ir.Node("", "Clip", [value, *bounds], name=f"Clip_{name}")
    producer, out = value.producer(), clip.outputs[0]
    assert producer is not None
    out.name, out.type, out.shape = f"{name}_clipped", value.type, value.shape
    graph.insert_after(producer, clip)
    for reader, index in readers:
        reader.replace_input_with(index, out)
    for index, output in enumerate(graph.outputs):
        if output is value:
            value.name, out.name = f"{name}_whole", name
            graph.outputs[index] = out


def _low(name: str) -> str:
    return f"{name}_low"


def _high(name: str) -> str:
    return f"{name}_high"
