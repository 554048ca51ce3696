"""Recognize digits with LeNet made layer by layer: the MNIST sample of TensorRT, with Tandem.

    python examples/mnist.py
    python examples/mnist.py --profile orin-nano-8gb --precision fp16

The digits are drawn, so that nothing is downloaded. Convolutions and the first fully connected
layer have random weights; those of the last are found by least squares, in a second.

From TensorRT's Python API it differs in two ways: strides and the like are arguments of `add_...`,
and a layer can be passed on for its first output.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

import tandem

BATCH = 50
FONTS = (cv2.FONT_HERSHEY_SIMPLEX, cv2.FONT_HERSHEY_DUPLEX, cv2.FONT_HERSHEY_COMPLEX)
Floats = npt.NDArray[np.float32]


def populate(network: tandem.Network, weights: Mapping[str, Floats]) -> tandem.Layer:
    """Add LeNet without its last layer; return its features (BATCH, 500)."""
    image = network.add_input("image", np.float32, (BATCH, 1, 28, 28))
    conv1 = network.add_convolution_nd(
        image, 20, (5, 5), weights["conv1.weight"], weights["conv1.bias"], stride_nd=(1, 1)
    )
    pool1 = network.add_pooling_nd(conv1, tandem.PoolingType.MAX, (2, 2), stride_nd=(2, 2))
    conv2 = network.add_convolution_nd(
        pool1, 50, (5, 5), weights["conv2.weight"], weights["conv2.bias"], stride_nd=(1, 1)
    )
    pool2 = network.add_pooling_nd(conv2, tandem.PoolingType.MAX, (2, 2), stride_nd=(2, 2))
    flat = network.add_shuffle(pool2, reshape_dims=(0, -1))
    kernel = network.add_constant((500, 800), weights["fc1.weight"])
    product = network.add_matrix_multiply(
        flat, tandem.MatrixOperation.NONE, kernel, tandem.MatrixOperation.TRANSPOSE
    )
    bias = network.add_constant((1, 500), weights["fc1.bias"])
    fc1 = network.add_elementwise(product, bias, tandem.ElementWiseOperation.SUM)
    return network.add_activation(fc1, tandem.ActivationType.RELU)


def random_weights(rng: np.random.Generator) -> dict[str, Floats]:
    """Return weights that keep the variance of a layer's input."""
    shapes = {"conv1": (20, 1, 5, 5), "conv2": (50, 20, 5, 5), "fc1": (500, 800)}
    weights = {}
    for name, shape in shapes.items():
        spread = np.sqrt(2 / np.prod(shape[1:]))
        weights[f"{name}.weight"] = rng.normal(0, spread, shape).astype(np.float32)
        weights[f"{name}.bias"] = np.zeros(shape[0], np.float32)
    return weights


def draw_digits(rng: np.random.Generator, count: int) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return images [count, 1, 28, 28], 0 to 1, and their digits."""
    digits = rng.integers(0, 10, count)
    images = np.zeros((count, 1, 28, 28), np.float32)
    for image, digit in zip(images[:, 0], digits, strict=True):
        font, scale = FONTS[rng.integers(len(FONTS))], rng.uniform(0.7, 0.95)
        corner = (int(rng.integers(4, 10)), int(rng.integers(20, 26)))
        drawn = np.zeros((28, 28), np.uint8)
        cv2.putText(drawn, str(digit), corner, font, scale, 255, int(rng.integers(1, 3)))
        turn = cv2.getRotationMatrix2D((14, 14), rng.uniform(-12, 12), 1)
        image[:] = cv2.warpAffine(drawn, turn, (28, 28)) / 255 + rng.normal(0, 0.05, (28, 28))
    return images, digits


def infer(engine: Path, images: Floats, output: str) -> Floats:
    """Run images in batches; return the rows of an output."""
    with tandem.open_session(engine) as session:
        batches = images.reshape(-1, BATCH, 1, 28, 28)
        return np.concatenate([session.infer({"image": batch})[output] for batch in batches])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="laptop", help="see `tandem profiles`")
    parser.add_argument("--precision", choices=["fp32", "fp16"], default="fp32")
    parser.add_argument("--out", type=Path, default=Path("mnist.engine"))
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    weights = random_weights(rng)

    # The features of drawn digits, and the last layer that tells the digits from them.
    network = tandem.Network("features")
    network.mark_output(populate(network, weights), "features")
    engine = tandem.build(network, arguments.out.with_name("features.engine")).path
    images, digits = draw_digits(rng, 2000)
    features = infer(engine, images, "features")
    squares = features.T @ features + 10 * np.eye(500, dtype=np.float32)
    last = np.linalg.solve(squares, features.T @ np.eye(10, dtype=np.float32)[digits]).T

    network = tandem.Network("mnist")
    fc2 = network.add_fully_connected(populate(network, weights), 10, last)
    scores = network.mark_output(fc2, "scores")
    print(f"{scores.name}: {scores.dtype} {scores.shape}")
    result = tandem.build(
        network, arguments.out, profile=arguments.profile, precision=arguments.precision
    )
    print(f"wrote {result.path} ({result.path.stat().st_size / 1e6:.1f} MB)")

    images, digits = draw_digits(rng, 500)  # others than before
    right = infer(result.path, images, "scores").argmax(axis=1) == digits
    print(f"recognized {right.mean():.1%} of {len(digits)} digits")


if __name__ == "__main__":
    main()
