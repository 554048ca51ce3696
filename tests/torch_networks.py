"""Networks of torchvision and timm with random weights, and a small module of our own."""

from collections.abc import Callable

import torch

# torchvision's own operators are compiled for CUDA builds of PyTorch and do not load in others.
# Its networks for pictures do without; two schemas are all that its import asks for.
if not hasattr(torch.ops.torchvision, "nms"):
    for _name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )

import timm
from torchvision import models
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.resnet import BasicBlock

# Of MobileNetV3-Small: with and without squeeze-and-excite, ReLU and Hardswish, a residual.
MOBILE_BLOCKS = [
    InvertedResidualConfig(16, 3, 16, 16, True, "RE", 2, 1, 1),
    InvertedResidualConfig(16, 3, 72, 24, False, "RE", 2, 1, 1),
    InvertedResidualConfig(24, 5, 96, 40, True, "HS", 2, 1, 1),
    InvertedResidualConfig(40, 5, 240, 40, True, "HS", 1, 1, 1),
]

# name -> (constructor, shape of the input). Each has one of the blocks that it repeats.
NETWORKS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "mobilenet_v3": (lambda: models.MobileNetV3(MOBILE_BLOCKS, 64, num_classes=10), (1, 3, 64, 64)),
    "resnet": (lambda: models.ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10), (2, 3, 64, 96)),
    "vit_tiny": (
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10, depth=2),
        (1, 3, 64, 64),
    ),
}


def network(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a network in evaluation mode, its statistics as after training, and an input."""
    make, shape = NETWORKS[name]
    module = make().eval()
    for part in module.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.running_mean.normal_(std=0.1)
            part.running_var.uniform_(0.5, 1.5)
    return module, torch.randn(shape)


class Scaled(torch.nn.Module):
    """Two inputs with names; a linear layer and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 3)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, features: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        """features [N, 6], gain [N, 3] -> [N, 3]."""
        return self.dropout(self.linear(features)) * gain
