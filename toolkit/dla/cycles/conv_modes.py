"""The modes in which the array runs a convolution without groups: direct, image, Winograd.

A mode gives the buffer layout of the input and the packages per output position; the rest of the
model does not depend on the mode.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from toolkit.dla.cycles import buffer, post_processing, sequence
from toolkit.dla.cycles.configurations import BYTES_PER_ELEMENT, Config
from toolkit.dla.cycles.layers import ConvLayer

# An image of three channels is stored with four (formats of the image unit, hwarch).
IMAGE_CHANNELS = {1: 1, 3: 4, 4: 4}
# Input rows that one package joins, and the maximum channels of a kernel row and of a stride
# (unit_description, "post-extension"). What is joined has to fit one atom of the array, `atomic_c`
# channels: in nv_full these limits say the same.
JOINED_ROWS = ((2, 32), (4, 16))
WINOGRAD_TAPS = 16  # weights of a 3x3 kernel after their transform to 4x4


@dataclass(frozen=True, slots=True)
class ConvMode:
    """How the array runs a layer.

    entries: buffer entries of one input row (of all frames at once); row_bytes: of that row in
    memory; taps: weights per kernel and channel; run: output rows of one hardware layer -> its
    sequence.
    """

    name: str
    entries: int
    row_bytes: int
    taps: int
    run: Callable[[int], sequence.MacSequence]


def conv_modes(layer: ConvLayer, config: Config) -> Iterator[ConvMode]:
    """Yield every mode in which the array can run the layer, frame by frame."""
    yield direct(layer, config)
    if layer.image and layer.channels in IMAGE_CHANNELS and layer.dilation == (1, 1):
        for rows in _joinable_rows(layer, config):
            yield image(layer, config, rows)
    plain = layer.kernel == (3, 3) and layer.stride == layer.dilation == (1, 1)
    if config.winograd and config.uses_winograd and plain:
        yield winograd(layer, config)


def direct(layer: ConvLayer, config: Config, batch: int = 1) -> ConvMode:
    """Return direct convolution of `batch` frames at once (fully connected layers only)."""
    taps = layer.kernel[0] * layer.kernel[1]
    packages = taps * -(-layer.channels // config.atomic_c)
    return ConvMode(
        name="direct",
        entries=buffer.data_entries(layer, config) * batch,
        row_bytes=_feature_row(layer, config) * batch,
        taps=taps,
        run=lambda rows: sequence.direct(
            rows * layer.out_width,
            packages,
            layer.kernels,
            config=config,
            precision=layer.precision,
            batch=batch,
        ),
    )


def image(layer: ConvLayer, config: Config, joined: int) -> ConvMode:
    """Return convolution of an image: kernel columns, and `joined` of its rows, as channels."""
    stored = IMAGE_CHANNELS[layer.channels]
    extended = stored * layer.kernel[1] * joined
    packages = -(-layer.kernel[0] // joined) * -(-extended // config.atomic_c)
    return ConvMode(
        name="image" if joined == 1 else f"image, {joined} rows joined",
        entries=buffer.data_entries(layer, config, stored),
        row_bytes=layer.width * stored * BYTES_PER_ELEMENT[layer.precision],
        taps=layer.kernel[0] * layer.kernel[1],
        run=lambda rows: sequence.image(
            rows,
            layer.out_width,
            packages,
            layer.kernels,
            config=config,
            precision=layer.precision,
            joined=joined,
        ),
    )


def winograd(layer: ConvLayer, config: Config) -> ConvMode:
    """Return Winograd 3x3: a 4x4 input tile gives 2x2 outputs, four channels a package.

    Stripes are those of direct convolution, in tiles: not verified against the hardware.
    """
    columns = -(-layer.out_width // 4) * 4
    packages = -(-layer.channels // sequence.WINOGRAD_CHANNELS)
    return ConvMode(
        name="Winograd",
        entries=buffer.data_entries(layer, config),
        row_bytes=_feature_row(layer, config),
        taps=WINOGRAD_TAPS,
        run=lambda rows: sequence.direct(
            -(-rows // 4) * 4 * columns // sequence.WINOGRAD_TILE,
            packages,
            layer.kernels,
            config=config,
            precision=layer.precision,
        ),
    )


def depthwise(layer: ConvLayer, config: Config) -> ConvMode:
    """Return the mode of a depthwise unit, if there is one: no open hardware has it."""
    taps = layer.kernel[0] * layer.kernel[1]
    turns = taps * -(-layer.kernels // config.depthwise_channels)

    def run(rows: int) -> sequence.MacSequence:
        clocks = rows * layer.out_width * turns
        return sequence.MacSequence(clocks, clocks, 0)

    entries = buffer.data_entries(layer, config)
    return ConvMode("depthwise unit", entries, _feature_row(layer, config), taps, run)


def _feature_row(layer: ConvLayer, config: Config) -> int:
    channels = post_processing.padded_channels(layer.channels, config, layer.precision)
    return layer.width * channels * BYTES_PER_ELEMENT[layer.precision]


def _joinable_rows(layer: ConvLayer, config: Config) -> Iterator[int]:
    yield 1
    stored = IMAGE_CHANNELS[layer.channels]
    if config.image_post_extension:
        for rows, limit in JOINED_ROWS:
            if stored * max(layer.kernel[1], layer.stride[1]) <= min(
                limit, config.atomic_c // rows
            ):
                yield rows
