"""Step 5 of the build: for which nodes the GPU backend has a kernel, asked before the plan."""

from collections.abc import Sequence

import onnx_ir as ir

from device.engine.manifest import DimRange
from toolkit.gpu.shapes.inference import traces_of
from toolkit.gpu.support import ask_support
from toolkit.partition.planning.portable import KernelSupport
from toolkit.plugins import Plugin

TENSORRT_PLUGIN = (
    "a plugin of TensorRT, which TensorRT runs on the GPU; for an engine of Tandem take it out of "
    "the model, or give its function with `tandem build --plugin`"
)


def ask_gpu(
    model: ir.Model, dims: Sequence[DimRange] = (), plugins: Sequence[Plugin] = ()
) -> KernelSupport:
    """Return what the GPU backend says of each node of a graph that is to be planned.

    `dims`: the dimensions that stay dynamic; what only lowering knows of those is not asked here.
    Raises PluginError: a plugin fails.
    """
    plugged = [plugin.title for plugin in plugins]
    refused = dict(ask_support(model, plugged, dynamic=bool(dims)).refused)
    ops = {str(node.name): node.op_type for node in model.graph}
    refused |= {name: TENSORRT_PLUGIN for name in refused if ops[name].endswith("_TRT")}
    if not dims:
        return KernelSupport(refused)
    opt = traces_of(dims, plugins)[0].after(model)
    shapes = {name: tuple(map(int, shape)) for name, shape in opt.known.shapes.items()}
    return KernelSupport(refused, shapes)
