"""Fine-tune a PyTorch network with the INT8 arithmetic of its engine.

    python examples/fine_tune.py
    python examples/fine_tune.py --profile orin-nano-8gb --steps 40

A small network learns to tell drawn digits apart, in floating point. INT8 then costs some of that;
a few more steps with `tandem.fake_quantize` win it back. The engine computes the numbers that the
training has seen: on a DLA all of them, on a GPU all but a few that lie next to a half.
"""

import argparse
from pathlib import Path

import cv2
import numpy as np
import torch

import tandem

SIZE, BATCH = 24, 16
FONTS = (cv2.FONT_HERSHEY_SIMPLEX, cv2.FONT_HERSHEY_DUPLEX, cv2.FONT_HERSHEY_COMPLEX)


class Digits(torch.nn.Module):
    """Depthwise convolutions, whose channels have ranges of their own; they suffer in INT8."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, stride=2, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 16, 3, padding=1, groups=16),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(32, 32, 3, padding=1, groups=32),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 32, 1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 10, 6),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """images [N, 1, 24, 24] from 0 to 1 -> scores [N, 10, 1, 1]."""
        return self.layers(images)


def draw(rng: np.random.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return drawn digits [count, 1, 24, 24] with noise, and what they are."""
    images = np.zeros((count, 1, SIZE, SIZE), np.float32)
    labels = rng.integers(0, 10, count)
    for image, label in zip(images, labels, strict=True):
        corner = (int(rng.integers(2, 8)), int(rng.integers(17, 22)))
        font, height = FONTS[rng.integers(len(FONTS))], float(rng.uniform(0.5, 0.75))
        drawn = np.zeros((SIZE, SIZE), np.uint8)
        cv2.putText(drawn, str(label), corner, font, height, 255)
        image[0] = drawn / 255 + rng.normal(0, 0.15, drawn.shape)
    return torch.from_numpy(images), torch.from_numpy(labels)


def train(
    network: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, steps: int, rate: float
) -> None:
    """Run some steps of Adam on batches, one after the other."""
    optimizer = torch.optim.Adam(network.parameters(), lr=rate)
    for step in range(steps):
        first = step * BATCH % (len(images) - BATCH + 1)
        batch = slice(first, first + BATCH)
        optimizer.zero_grad()
        scores = network(images[batch]).flatten(1)
        torch.nn.functional.cross_entropy(scores, labels[batch]).backward()
        optimizer.step()


def judge(network: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> str:
    """Return loss and share of right answers as text."""
    with torch.no_grad():
        scores = network(images).flatten(1)
    loss = torch.nn.functional.cross_entropy(scores, labels)
    right = (scores.argmax(1) == labels).float().mean()
    return f"loss {loss:.4f}, {100 * right:.1f}% right"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="orin-nx-16gb")
    parser.add_argument("--steps", type=int, default=24, help="of fine-tuning")
    parser.add_argument("--out", type=Path, default=Path("digits.engine"))
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # the layers are too small to share
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    images, labels = draw(rng, 1600)
    unseen = draw(rng, 200)
    module = Digits()
    train(module, images, labels, steps=400, rate=0.005)
    print(f"floating point: {judge(module.eval(), *unseen)}")

    model = tandem.TorchModel(module, (images[:1],))
    samples = list(images[:32, None].numpy())
    table = tandem.calibrate(
        model, samples, method="percentile:99", profile=arguments.profile, accept_loss=True
    )
    network = tandem.fake_quantize(model, calibration=table, profile=arguments.profile)
    print(f"INT8: {judge(network, *unseen)}")
    train(network, images, labels, steps=arguments.steps, rate=0.001)
    print(f"INT8, fine-tuned: {judge(network, *unseen)}")

    engine = tandem.build(
        network.model(), arguments.out, profile=arguments.profile, calibration=network.table()
    )
    with tandem.open_session(engine.path, dla="fast") as session, torch.no_grad():
        (name,) = (tensor.name for tensor in session.inputs)
        equal = 0
        for image in unseen[0][:, None]:
            (scores,) = session.infer({name: image.numpy()}).values()
            equal += int(np.allclose(scores, network(image).numpy(), rtol=1e-6, atol=1e-6))
    print(f"the engine gives the scores of the training for {equal} of {len(unseen[0])} images")


if __name__ == "__main__":
    main()
