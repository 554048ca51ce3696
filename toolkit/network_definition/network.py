"""`Network`: all layers, and plugins.

What TensorRT sets on a layer after adding it (strides, padding, axes) is an argument here, so that
shapes are known and checked at once.
"""

from collections.abc import Mapping, Sequence

from toolkit.network_definition.layers import Layer, Operand, tensor_of
from toolkit.network_definition.mathematical import MathLayers
from toolkit.network_definition.shaping import ShapingLayers
from toolkit.network_definition.weighted import WeightedLayers
from toolkit.plugins import Attribute, Plugin


class Network(WeightedLayers, MathLayers, ShapingLayers):
    """A network under construction; `tandem.build` and `tandem.plan` take it like a model file.

    Methods take tensors or layers and return a `Layer`. They raise NetworkError where the inputs do
    not fit; it names the layer and the shapes. Weights are arrays, flat or in their shape. Axes are
    a bit mask as in TensorRT (`1 << 1`) or a sequence of indices.
    """

    def add_plugin(
        self,
        inputs: Sequence[Operand],
        plugin: Plugin,
        attributes: Mapping[str, Attribute] | None = None,
        *,
        name: str | None = None,
    ) -> Layer:
        """Add an operator of yours; its outputs have the type of the first input.

        Raises PluginError: the plugin does not take the attributes or the shapes.
        """
        name = self._draft.claim(name, "plugin")
        tensors = [tensor_of(operand) for operand in inputs]
        if plugin not in self.plugins:
            self.plugins = (*self.plugins, plugin)
        return Layer(name, self._draft.plugin(name, plugin, tensors, attributes or {}))
