"""The ways in which the array can run a convolution without groups: direct, image, Winograd.

A way says how the input lies in the buffer and how many packages an output position takes; the
rest of the model does not ask which it is.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from toolkit.dla.cycles import buffer, post, sequence
from toolkit.dla.cycles.configurations import BYTES_PER_ELEMENT, Config
from toolkit.dla.cycles.layers import ConvLayer

# A picture of three channels lies in memory as four (formats of the image unit, hwarch).
PICTURE_CHANNELS = {1: 1, 3: 4, 4: 4}
# Input rows that one package joins, and what the channels of a kernel row and of a step may be at
# most (unit_description, "post-extension").
JOINED_ROWS = ((2, 32), (4, 16))
WINOGRAD_TAPS = 16  # weights of a 3x3 kernel after their transform to 4x4


@dataclass(frozen=True, slots=True)
class Way:
    """How the array runs a layer.

    entries: of the buffer for one input row (of all frames at once); row_bytes: of that row in
    memory; taps: weights of a kernel and channel; run: output rows of one hardware layer -> its
    sequence.
    """

    mode: str
    entries: int
    row_bytes: int
    taps: int
    run: Callable[[int], sequence.Sequence]


def ways(layer: ConvLayer, config: Config) -> Iterator[Way]:
    """Yield every way in which the array can run the layer, frame by frame."""
    yield direct(layer, config)
    if layer.image and layer.channels in PICTURE_CHANNELS and layer.dilation == (1, 1):
        for rows in _joinable_rows(layer, config):
            yield image(layer, config, rows)
    plain = layer.kernel == (3, 3) and layer.stride == layer.dilation == (1, 1)
    if config.winograd and config.uses_winograd and plain:
        yield winograd(layer, config)


def direct(layer: ConvLayer, config: Config, batch: int = 1) -> Way:
    """Return direct convolution, of `batch` frames at once (fully connected layers only)."""
    taps = layer.kernel[0] * layer.kernel[1]
    packages = taps * -(-layer.channels // config.atomic_c)
    return Way(
        mode="direct",
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


def image(layer: ConvLayer, config: Config, joined: int) -> Way:
    """Return convolution of a picture: kernel columns, and `joined` of its rows, as channels."""
    stored = PICTURE_CHANNELS[layer.channels]
    extended = stored * layer.kernel[1] * joined
    packages = -(-layer.kernel[0] // joined) * -(-extended // config.atomic_c)
    return Way(
        mode="image" if joined == 1 else f"image, {joined} rows joined",
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


def winograd(layer: ConvLayer, config: Config) -> Way:
    """Return Winograd's 3x3: a 4x4 input tile makes 2x2 outputs, four channels a package.

    The stripes are those of direct convolution, counted in tiles: not checked against the hardware.
    """
    columns = -(-layer.out_width // 4) * 4
    packages = -(-layer.channels // sequence.WINOGRAD_CHANNELS)
    return Way(
        mode="Winograd",
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


def depthwise(layer: ConvLayer, config: Config) -> Way:
    """Return a unit for depthwise convolution, if there is one: no open hardware has it."""
    taps = layer.kernel[0] * layer.kernel[1]
    turns = taps * -(-layer.kernels // config.depthwise_channels)

    def run(rows: int) -> sequence.Sequence:
        clocks = rows * layer.out_width * turns
        return sequence.Sequence(clocks, clocks, 0)

    entries = buffer.data_entries(layer, config)
    return Way("depthwise unit", entries, _feature_row(layer, config), taps, run)


def _feature_row(layer: ConvLayer, config: Config) -> int:
    channels = post.padded_channels(layer.channels, config, layer.precision)
    return layer.width * channels * BYTES_PER_ELEMENT[layer.precision]


def _joinable_rows(layer: ConvLayer, config: Config) -> Iterator[int]:
    yield 1
    stored = PICTURE_CHANNELS[layer.channels]
    if config.image_post_extension:
        for rows, limit in JOINED_ROWS:
            if stored * max(layer.kernel[1], layer.stride[1]) <= limit:
                yield rows
