"""Small networks with random weights whose kernels together are most that engines have.

convolutions  dense, depthwise, grouped, pointwise and strided; residual, clipping, pools, a head
maps          transposed convolution, resize, concatenation, slices, sigmoid, maxima
tokens        patches, attention, layer normalization, softmax, an error function
"""

import onnx_ir as ir

from scripts.networks.graph import Net
from scripts.networks.transformers import vit_small
from toolkit.board_kit.make import ReferenceModel
from toolkit.importers.onnx import ModelBytes

_SIDE = 64


def convolutions() -> ir.Model:
    """Return a residual network with depthwise and grouped convolutions."""
    net = Net("convolutions", (1, 3, _SIDE, _SIDE))
    x = net.relu(net.conv(net.image, 32, 3, 2, bias=True))
    y = net.relu6(net.conv(x, 32, 3, group=32, bias=True))
    x = net.relu(net.add(net.conv(y, 32, 1, bias=True), x))
    x = net.relu(net.conv(x, 64, 3, 2, bias=True))
    y = net.relu(net.conv(x, 64, 3, group=4, bias=True))
    x = net.relu(net.add(net.conv(y, 64, 1, bias=True), x))
    x = net.pool(x, 2, 2)
    x = net.silu(net.conv(x, 128, 5, bias=True))
    x = net.leaky(net.conv(x, 128, 1, bias=True))
    x = net.pool(x, 2, 2, kind="AveragePool")
    return net.model(net.linear(net.flatten(net.mean(x)), 40))


def maps() -> ir.Model:
    """Return a small encoder and decoder with skips."""
    net = Net("maps", (1, 3, _SIDE, _SIDE))
    fine = net.relu(net.conv(net.image, 32, 3, bias=True))
    coarse = net.relu(net.conv(net.pool(fine, 2, 2), 64, 3, bias=True))
    low = net.relu(net.conv(net.pool(coarse, 2, 2), 64, 3, bias=True))
    up = net.concat(net.deconv(low, 32, 2, 2), coarse)
    up = net.relu(net.conv(up, 32, 3, bias=True))
    up = net.concat(net.upsample(up), fine)
    left, right = net.split(net.conv(up, 32, 1, bias=True), 16, 16)
    gated = net.mul(left, net.unary("Sigmoid", right))
    return net.model(net.conv(gated, 8, 1, bias=True))


def tokens() -> ir.Model:
    """Return a transformer of one layer over 16 patches."""
    return vit_small(_SIDE, depth=1)


def convolutions_on_dla() -> ir.Model:
    """Return a network whose nodes a DLA takes, with a residual and a pool."""
    net = Net("convolutions", (1, 3, _SIDE, _SIDE))
    x = net.relu(net.conv(net.image, 32, 3, 2, bias=True))
    y = net.relu(net.conv(x, 32, 3, bias=True))
    x = net.relu(net.add(net.conv(y, 32, 1, bias=True), x))
    x = net.relu(net.conv(net.pool(x, 2, 2), 64, 3, bias=True))
    return net.model(net.conv(net.pool(x, 2, 2, kind="AveragePool"), 16, 1, bias=True))


def _bytes(model: ir.Model) -> ModelBytes:
    return ModelBytes(f"{model.graph.name}.onnx", ir.to_proto(model).SerializeToString())


_INPUT = {"image": (1, 3, _SIDE, _SIDE)}
REFERENCES: dict[str, ReferenceModel] = {
    "convolutions": ReferenceModel(
        "convolutions", _bytes(convolutions()), _INPUT, ("fp32", "fp16", "int8")
    ),
    "maps": ReferenceModel("maps", _bytes(maps()), _INPUT, ("fp16", "int8")),
    "tokens": ReferenceModel("tokens", _bytes(tokens()), _INPUT, ("fp16",)),
    "dla": ReferenceModel("dla", _bytes(convolutions_on_dla()), _INPUT, ("int8", "fp16"), on="dla"),
}
