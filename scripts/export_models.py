"""Export public networks to ONNX, so that calibration can be judged on them.

    python scripts/export_models.py /tmp/models [--models mobilenet_v2 resnet18] [--steps 200]

The networks are those of torchvision and timm, as these define them: input `images`, float32 [1, 3,
224, 224], output `logits`, float32 [1, 1000], of LRASPP [1, 21, 224, 224], opset 17. No weights are
downloaded. Initial weights give nearly equal channels and activations unlike those of a trained
network. So each network first learns a small task from a fixed seed: which quarter of which of
eleven photographs in `configs/scenes/backgrounds` a crop shows, under any lighting and mirroring
(exemplar learning, Dosovitskiy et al., 2014). A fixed random matrix maps the outputs, of LRASPP
their means over the pixels, to the 44 classes, so that all outputs matter. Then the batch norms
measure their statistics again at full size. The three photographs behind the held-out scenes are
never used.

The weights are not useful for anything else. The files are not part of the project.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import numpy.typing as npt

from toolkit.demo.scenes.backgrounds import HELD_OUT_PHOTOGRAPHS

if TYPE_CHECKING:
    from torch import Tensor, nn

Image = npt.NDArray[np.uint8]

BACKGROUNDS = Path(__file__).resolve().parent.parent / "configs" / "scenes" / "backgrounds"
SEED = 17
SIZE, CLASSES = 224, 1000
SEGMENTS = 21  # classes of LRASPP, as of torchvision's weights
GRID = (2, 2)  # places in a photograph: rows, columns; 11 photographs make 44 classes
SMALL = 96  # pixels; convolutions learn from smaller pictures as well, in a fifth of the time
# ImageNet's, as torchvision's and most of timm's weights expect them.
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)
PIP = "pip install 'tandem-edge[host,train]' torchvision timm"
# The C++ operators that torchvision wants to exist when it is imported.
TORCHVISION_OPERATORS = (
    "nms",
    "qnms",
    "roi_align",
    "roi_pool",
    "ps_roi_align",
    "ps_roi_pool",
    "deform_conv2d",
)


def main() -> None:
    """Train and export each network that was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for the ONNX files")
    parser.add_argument("--models", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--steps", type=int, default=200, help="training steps of each network")
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--device", default="cpu", help="where PyTorch trains, as it names it")
    arguments = parser.parse_args()
    _import_libraries()
    arguments.out.mkdir(parents=True, exist_ok=True)
    photographs = _photographs()
    for name in arguments.models:
        start = time.perf_counter()
        network, loss = _trained(
            name, photographs, arguments.steps, arguments.batch, arguments.device
        )
        path = arguments.out / f"{name}.onnx"
        _export(network, path)
        print(
            f"{path}: loss {loss:.2f} after {arguments.steps} steps, "
            f"{time.perf_counter() - start:.0f} s",
            flush=True,
        )


def _import_libraries() -> None:
    """Import what the export needs, or leave with the command that installs it."""
    try:
        import torch

        try:
            import torchvision
        except RuntimeError:
            # torchvision's wheel is for another build of PyTorch (CUDA beside CPU). The
            # classifiers call none of its operators; their names are all that the import needs.
            library = torch.library.Library("torchvision", "FRAGMENT")
            for name in TORCHVISION_OPERATORS:
                for operator in (name, f"_{name}_backward"):
                    library.define(f"{operator}(Tensor x) -> Tensor")
            _KEPT.append(library)
            import torchvision  # noqa: F401
        import timm  # noqa: F401
    except ImportError as error:
        sys.exit(f"export_models.py needs {error.name}, which is not installed: {PIP}")


_KEPT: list[object] = []  # a torch Library takes its operators with it when it is collected


def _torchvision(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from torchvision import models

        return models.get_model(name, weights=None, num_classes=CLASSES)  # type: ignore[no-any-return]

    return make


def _timm(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=CLASSES)

    return make


def _lraspp() -> nn.Module:
    import torch
    from torchvision import models

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = models.get_model(
                "lraspp_mobilenet_v3_large",
                weights=None,
                weights_backbone=None,
                num_classes=SEGMENTS,
            )

        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.network(images)["out"]
            return logits

    return Logits()


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mobilenet_v2": _torchvision("mobilenet_v2"),
    "efficientnet_b0": _torchvision("efficientnet_b0"),
    "vit_tiny_patch16_224": _timm("vit_tiny_patch16_224"),
    "resnet18": _torchvision("resnet18"),
    "resnet50": _torchvision("resnet50"),
    "efficientvit_b0": _timm("efficientvit_b0"),
    "lraspp_mobilenet_v3_large": _lraspp,
}


def _photographs() -> list[Image]:
    """The photographs, BGR, without those behind the held-out scenes."""
    files = [
        path for path in sorted(BACKGROUNDS.glob("*.jpg")) if path.stem not in HELD_OUT_PHOTOGRAPHS
    ]
    return [np.asarray(cv2.imread(str(path)), np.uint8) for path in files]


def _crop(photographs: list[Image], label: int, size: int, rng: np.random.Generator) -> Image:
    """Crop the place `label`, randomly moved, scaled, mirrored and lit: uint8 [size, size, 3]."""
    which, place = divmod(label, GRID[0] * GRID[1])
    picture = photographs[which]
    height, width = picture.shape[:2]
    side = min(height, width) * rng.uniform(0.35, 0.6)
    row, column = np.array(divmod(place, GRID[1])) + rng.uniform(0, 1, 2)
    y = int((height - side) * row / GRID[0])
    x = int((width - side) * column / GRID[1])
    crop = picture[y : y + int(side), x : x + int(side)]
    crop = cv2.resize(crop, (size, size), interpolation=cv2.INTER_AREA)
    if rng.random() < 0.5:
        crop = crop[:, ::-1]
    lit = (crop - 128.0) * rng.uniform(0.6, 1.4) + 128 + rng.uniform(-40, 40)
    return np.clip(lit * rng.uniform(0.85, 1.15, 3), 0, 255).astype(np.uint8)


def _batches(photographs: list[Image], size: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pictures [batch, 3, size, size], RGB and normalised, and their labels [batch]; no end."""
    import torch

    rng = np.random.default_rng([SEED, size])
    while True:
        labels = rng.integers(0, len(photographs) * GRID[0] * GRID[1], batch)
        crops = [_crop(photographs, int(label), size, rng)[:, :, ::-1] for label in labels]
        pictures = (np.stack(crops).astype(np.float32) / 255 - MEAN) / STD
        yield (
            torch.from_numpy(np.ascontiguousarray(pictures.transpose(0, 3, 1, 2))),
            torch.from_numpy(labels),
        )


def _trained(
    name: str, photographs: list[Image], steps: int, batch: int, device: str
) -> tuple[nn.Module, float]:
    """A network that has learnt the places, in eval mode on the CPU, and its last mean loss."""
    import torch
    from torch.nn import functional

    torch.manual_seed(SEED)
    network = NETWORKS[name]().to(device).train()
    classes = len(photographs) * GRID[0] * GRID[1]
    outputs = SEGMENTS if name.startswith("lraspp") else CLASSES
    readout = (torch.randn(outputs, classes) / outputs**0.5).to(device)
    vit = name.startswith("vit")  # built for one size, and wants to learn slowly
    size, rate = (SIZE, 5e-4) if vit else (SMALL, 2e-3)
    optimiser = torch.optim.AdamW(network.parameters(), weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, rate, total_steps=max(steps, 2), pct_start=0.2
    )
    losses: list[float] = []
    for (pictures, labels), step in zip(
        _batches(photographs, size, batch), range(steps), strict=False
    ):
        logits = network(pictures.to(device))
        scores = logits.flatten(2).mean(2) @ readout if logits.ndim > 2 else logits @ readout
        loss = functional.cross_entropy(scores, labels.to(device))
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
        if step % 25 == 0:
            print(f"{name}: step {step} of {steps}, loss {losses[-1]:.2f}", file=sys.stderr)
    _measure_batch_norms(network, photographs, device)
    return network.cpu().eval(), float(np.mean(losses[-20:])) if losses else float("nan")


def _measure_batch_norms(network: nn.Module, photographs: list[Image], device: str) -> None:
    """Set batch norm statistics from eight batches at full size."""
    import torch

    norms = [module for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    if not norms:
        return
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average, not a moving one
    with torch.no_grad():
        for (pictures, _), _ in zip(_batches(photographs, SIZE, 32), range(8), strict=False):
            network(pictures.to(device))


def _export(network: nn.Module, path: Path) -> None:
    import torch

    part = path.with_name(f"{path.name}.part")
    torch.onnx.export(
        network,
        (torch.zeros(1, 3, SIZE, SIZE),),
        str(part),
        input_names=["images"],
        output_names=["logits"],
        opset_version=17,
        dynamo=False,
    )
    part.replace(path)


if __name__ == "__main__":
    main()
