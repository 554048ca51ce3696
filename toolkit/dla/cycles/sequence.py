"""The sequence of the MAC array over a convolution, in clocks.

From the sequencer of the open hardware (nvdla/hw, branch nvdlav1,
vmod/nvdla/csc/NV_NVDLA_CSC_sg.v, lines 2925-2955, 5072-5116 and 7190-7275; branch master for the
smaller rows of the table). Loops from outside to inside: kernel group > stripe of output
positions > block of channels > kernel row > kernel column. One turn of the innermost loop is a
package. Its duration is the maximum of

    its data: stripe x batch        clocks
    the minimum of the pipeline     clocks
    the transfer of the group's weights from the buffer to the array.

The division of output positions into stripes determines everything, so the sum over all packages
has a closed form. Stride and dilation cost nothing; padding costs like any position.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from toolkit.dla.cycles.configurations import BYTES_PER_ELEMENT, Config, Precision

WINOGRAD_TILE = 4  # outputs of one 4x4 input tile of a 3x3 kernel (hwarch: Winograd mode)
WINOGRAD_CHANNELS = 4  # channels of a package in that mode: 4 x 4 x 4 = 64 products


@dataclass(frozen=True, slots=True)
class MacSequence:
    """Clocks of the array: total, with data, and those that the weights alone need."""

    cycles: int
    data: int
    weights: int

    def times(self, count: int) -> "MacSequence":
        """Return the sequence of `count` such layers one after another."""
        return MacSequence(self.cycles * count, self.data * count, self.weights * count)


NOTHING = MacSequence(0, 0, 0)


def total_of(sequences: Iterable[MacSequence]) -> MacSequence:
    """Return the sequence of all these layers one after another."""
    cycles = data = weights = 0
    for part in sequences:
        cycles += part.cycles
        data += part.data
        weights += part.weights
    return MacSequence(cycles, data, weights)


def direct(
    positions: int,
    packages: int,
    kernels: int,
    *,
    config: Config,
    precision: Precision,
    batch: int = 1,
) -> MacSequence:
    """Return the sequence of a direct convolution.

    positions: output rows x columns; packages: kernel rows x columns x blocks of channels;
    kernels: all output channels; batch: frames that share the weights (fully connected layers).
    """
    lengths = [
        (length * batch, count) for length, count in direct_stripes(positions, config, batch)
    ]
    return _over_groups(lengths, packages, kernels, config, precision)


def image(
    rows: int,
    columns: int,
    packages: int,
    kernels: int,
    *,
    config: Config,
    precision: Precision,
    joined: int,
) -> MacSequence:
    """Return the sequence of a convolution of an image: its stripes end with each line.

    joined: input rows that one package takes at once (1, 2 or 4); stripes are rounded up to it.
    """
    full, last = divmod(columns, config.image_stripe)
    lengths = [(config.image_stripe, full * rows)] if full else []
    if last:
        lengths.append((-(-last // joined) * joined, rows))
    return _over_groups(lengths, packages, kernels, config, precision)


def direct_stripes(positions: int, config: Config, batch: int = 1) -> list[tuple[int, int]]:
    """Return (length, count) of the stripes of the output positions.

    A stripe has length `lower` until the rest fits one of at most `upper`. Larger batches have
    shorter stripes, so that the accumulator holds all partial sums.
    """
    lower, upper = _limits(config, batch)
    stripes = []
    remaining = positions
    if config.long_stripes and remaining >= 2 * upper:
        count = remaining // upper - 1
        stripes.append((upper, count))
        remaining -= upper * count
    if remaining > upper:
        count = -(-(remaining - upper) // lower)
        stripes.append((lower, count))
        remaining -= lower * count
    stripes.append((remaining, 1))
    return stripes


def _limits(config: Config, batch: int) -> tuple[int, int]:
    if batch == 1:
        return config.stripe, 2 * config.stripe
    lower = max(1, config.stripe >> (batch.bit_length() - 1))
    return lower, lower if batch >= config.stripe else 2 * lower


def _over_groups(
    lengths: list[tuple[int, int]],
    packages: int,
    kernels: int,
    config: Config,
    precision: Precision,
) -> MacSequence:
    at_once = config.kernels_at_once(precision)
    groups, rest = divmod(kernels, at_once)
    data = sum(length * count for length, count in lengths)
    stripes = sum(count for _, count in lengths)
    cycles = weights = 0
    for size, number in ((at_once, groups), (rest, 1 if rest else 0)):
        clocks = weight_clocks(size, config, precision)
        floor = max(config.package_minimum, clocks)
        cycles += number * sum(max(length, floor) * count for length, count in lengths)
        weights += number * stripes * clocks
    total_groups = groups + (1 if rest else 0)
    return MacSequence(packages * cycles, packages * total_groups * data, packages * weights)


def weight_clocks(kernels: int, config: Config, precision: Precision) -> int:
    """Return the clocks to transfer the weights of one package from the buffer to the array."""
    size = kernels * config.atomic_c * BYTES_PER_ELEMENT[precision]
    return -(-size // config.weight_bytes)
