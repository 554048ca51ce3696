"""Compute one layer as the DLA does, bit by bit, and see what its integers cost.

    python examples/dla_arithmetic.py
    python examples/dla_arithmetic.py --channels 64 --seed 7

A convolution of INT8 numbers, its bias, a rectifier and the rounding to INT8, then a pooling and a
local response normalization: `device.dla_emulator.arithmetic` alone, without an engine or a model.
"""

import argparse

import numpy as np

from tandem import dla


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)

    # INT8 numbers with their scales: real = number * scale.
    x = rng.integers(-128, 128, (1, arguments.channels, 16, 16)).astype(np.int8)
    weight = rng.integers(-127, 128, (8, arguments.channels, 3, 3)).astype(np.int8)
    scale_x, scale_y = 0.02, 0.4
    scale_w = 0.02 * np.logspace(0, -3.7, 8)  # channels whose weights are ever smaller
    bias = rng.normal(10, 5, 8)

    # The products: exact sums in the accumulators.
    geometry = dla.Geometry((3, 3), pads=(1, 1, 1, 1))
    sums = dla.convolve_whole(x, dla.make_kernel(weight, geometry))[0]

    # The output stages: one 16-bit multiplier a channel, all with one shift.
    factor = (scale_x * scale_w / scale_y)[:, None, None]
    whole = dla.bias_integers(bias[:, None, None], (scale_x * scale_w)[:, None, None])
    meaning, rectifier = dla.Sums(factor, whole), dla.Activation(low=0.0)
    y = dla.finish(sums, dla.make_path(meaning, rectifier, scale_y, "hardware"))
    exact = dla.finish(sums, dla.make_path(meaning, rectifier, scale_y, "ideal"))
    off = np.abs(y.astype(int) - exact)
    print(
        f"convolution: {np.mean(off > 0):.1%} of the numbers differ from exact scales, by at most"
    )
    print(f"  {off.max()} steps; the channel with the smallest factor keeps ", end="")
    least_scale = dla.multiplier_of(factor).scale.min()
    print(f"{int(least_scale).bit_length()} of 15 bits of its multiplier")

    # A pooling rounds along the width, then along the height.
    pooled = dla.average(y[None], dla.Window((2, 2), (2, 2)))
    means = y.reshape(8, 8, 2, 8, 2).mean(axis=(2, 4))
    once = np.sign(means) * np.floor(np.abs(means) + 0.5)
    print(f"pooling: {np.mean(pooled[0] != once):.1%} differ from one rounding of the mean")

    # Normalization goes by tables; what no register holds is refused by name.
    registers = dla.lrn_registers(dla.Lrn(5, alpha=0.01), scale_y, scale_y)
    normalized = dla.normalize(pooled, registers)
    print(f"normalization: from {pooled.max()} down to {normalized.max()} at most")
    try:
        dla.Converter(offset=0, scale=40000, shift=12)
    except dla.DlaError as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    main()
