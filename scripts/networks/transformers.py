"""Vision Transformer, small, and a plain transformer encoder."""

import math

import onnx_ir as ir

from scripts.networks.graph import Net, channels, dims


def _width(x: ir.Value) -> int:
    assert x.shape is not None
    return dims(x)[-1]


def linear(net: Net, x: ir.Value, maps: int) -> ir.Value:
    """Multiply the last dimension of (N, ..., K) by a matrix and add a bias."""
    return net.add(net.matmul(x, net.weight(_width(x), maps)), net.weight(maps))


def layer_norm(net: Net, x: ir.Value) -> ir.Value:
    """Normalise along the last dimension."""
    scale, shift = net.weight(_width(x)), net.weight(_width(x))
    assert x.shape is not None
    shape = list(dims(x))
    return net.op("LayerNormalization", [x, scale, shift], shape, axis=-1, epsilon=1e-6)


def gelu(net: Net, x: ir.Value) -> ir.Value:
    """x (1 + erf(x / sqrt 2)) / 2, in the operators that exporters write."""
    y = net.unary("Erf", net.mul(x, net.constant([1 / math.sqrt(2)])))
    return net.mul(net.mul(x, net.add(y, net.constant([1.0]))), net.constant([0.5]))


def _attention(net: Net, x: ir.Value, heads: int) -> ir.Value:
    """Attend from every token to every token (Vaswani et al., 2017)."""
    assert x.shape is not None
    batch, tokens, width = dims(x)
    each = width // heads
    parts = net.split(linear(net, x, 3 * width), width, width, width, axis=2)
    q, k, v = (net.reshape(part, batch, tokens, heads, each) for part in parts)
    scores = net.matmul(net.transpose(q, 0, 2, 1, 3), net.transpose(k, 0, 2, 3, 1))
    weights = net.softmax(net.mul(scores, net.constant([1 / math.sqrt(each)])))
    mixed = net.transpose(net.matmul(weights, net.transpose(v, 0, 2, 1, 3)), 0, 2, 1, 3)
    return linear(net, net.reshape(mixed, batch, tokens, width), width)


def _block(net: Net, x: ir.Value, heads: int) -> ir.Value:
    x = net.add(x, _attention(net, layer_norm(net, x), heads))
    y = gelu(net, linear(net, layer_norm(net, x), 4 * _width(x)))
    return net.add(x, linear(net, y, _width(x)))


def _vit(name: str, side: int, batch: int, width: int, *, depth: int) -> ir.Model:
    """Return ViT/16 (Dosovitskiy et al., 2021) with heads of 64, and a token for the class."""
    net = Net(name, (batch, 3, side, side))
    patches = net.conv(net.image, width, 16, 16, pad=0, bias=True)
    tokens = (side // 16) ** 2
    x = net.transpose(net.reshape(patches, batch, channels(patches), tokens), 0, 2, 1)
    shape = (batch, 1, width)
    first = net.op("Expand", [net.weight(1, 1, width), net.constant(shape)], shape)
    x = net.add(net.concat(first, x, axis=1), net.weight(1, tokens + 1, width))
    for _ in range(depth):
        x = _block(net, x, width // 64)
    x = net.op("Gather", [layer_norm(net, x), net.constant([0])], shape, axis=1)
    return net.model(net.linear(net.flatten(x), 1000))


def vit_small(side: int, batch: int = 1, *, depth: int = 12) -> ir.Model:
    """Return ViT-S/16 (Touvron et al., 2021): 384 channels, 6 heads."""
    return _vit("vit_small", side, batch, 384, depth=depth)


def vit_base(side: int, batch: int = 1, *, depth: int = 12) -> ir.Model:
    """Return ViT-B/16: 768 channels, 12 heads."""
    return _vit("vit_base", side, batch, 768, depth=depth)


def encoder(batch: int = 1, tokens: int = 32, width: int = 128, depth: int = 2) -> ir.Model:
    """Return a small transformer encoder: embedded tokens in, encoded tokens out."""
    net = Net("encoder", (batch, tokens, width))
    x = net.image
    for _ in range(depth):
        x = _block(net, x, 4)
    return net.model(layer_norm(net, x))
