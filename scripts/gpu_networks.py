"""The networks of `scripts/bench_gpu.py`, in PyTorch: random weights, well conditioned.

ResNet-50, MobileNetV2 and EfficientNet-B0 are torchvision's; ViT-S is torchvision's
VisionTransformer in the sizes of DeiT-S (Touvron et al., 2021); the detector has the blocks and
sizes of YOLOv8n (a backbone of C2f and SPPF, a pyramid, boxes as 16 bins a side, 80 classes). Any
other name is looked up in torchvision, then in timm.

Plain random weights make a chaotic network. On noise its outputs are nearly the same for every
image (two differ by 0.14 to 0.2 of their norm), and INT8 rounding errors are as large as the
difference, so an error says nothing. So weights are conditioned (`condition`), and images have
structure (`pictures`). Outputs of two images then differ by 0.3 to 1.4, and PyTorch with weights
and operands rounded to INT8 is off by 0.03 (ResNet-50, ViT-S), 0.06 (MobileNetV2), 0.08 (the
detector) and 0.18 (EfficientNet-B0, whose gates multiply errors; other biases and kernels gave a
quarter of the difference, too). Times do not depend on it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.efficientnet import MBConv
from torchvision.models.mobilenetv2 import InvertedResidual
from torchvision.models.resnet import BasicBlock, Bottleneck

SIZES = {"yolo8n": 640}  # of pictures; 224 where not given
GRIDS = (4, 16, 64)  # cells on a side of the patterns that make a picture
STATISTICS = 16  # pictures that normalizations take their statistics from
BRANCH = 0.25  # of a residual branch beside what it is added to: rounding does not grow with depth
BIAS = 1.0  # of normalized channels, in their own deviations: rectifiers are open more than shut
ROUGH = 0.6  # of a kernel's taps beside their mean: kernels keep what is smooth in a picture


def picture_size(name: str) -> int:
    """Return the height and width of a network's input."""
    return SIZES.get(name, 224)


def pictures(count: int, size: int, random: np.random.Generator) -> np.ndarray:
    """Return float32 images (count, 3, size, size): patterns at three scales, random lighting."""
    patterns = torch.zeros(count, 3, size, size)
    for cells in GRIDS:
        grid = torch.from_numpy(random.normal(size=(count, 3, cells, cells)).astype(np.float32))
        patterns += nn.functional.interpolate(grid, size=(size, size), mode="bilinear")
    contrast = random.uniform(0.25, 0.75, (count, 1, 1, 1)) / len(GRIDS) ** 0.5
    light = random.uniform(-1, 1, (count, 3, 1, 1))
    images: np.ndarray = (patterns.numpy() * contrast + light).astype(np.float32)
    return images


def make_network(name: str, device: str = "cuda") -> Any:  # noqa: ANN401  (torch has no types here)
    """Return a network with random weights, the same in each call."""
    torch.manual_seed(0)
    network = _untrained(name)
    condition(network)
    network = network.to(device)
    random = np.random.default_rng(0)
    seen = torch.from_numpy(pictures(STATISTICS, picture_size(name), random)).to(device)
    network.eval()
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    with torch.no_grad():  # statistics of its own activations keep 50 layers in range
        for norm in norms:
            norm.train()
        network(seen)
    return network.eval()


def _untrained(name: str) -> Any:  # noqa: ANN401
    if name in NETWORKS:
        return NETWORKS[name]()
    if hasattr(torchvision.models, name):
        return getattr(torchvision.models, name)(weights=None)
    import timm  # only networks that torchvision lacks need it

    return timm.create_model(name)


def condition(network: nn.Module) -> None:
    """Condition random weights: outputs depend on the input and do not amplify rounding."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # statistics are those of all pictures seen
            nn.init.constant_(module.bias, BIAS)
        if isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1):
            taps = module.weight.data
            module.weight.data = taps.mean((2, 3), keepdim=True) + ROUGH * taps
    for module in network.modules():
        if (last := _last_of_branch(module)) is not None:
            nn.init.constant_(last.weight, BRANCH)


def _last_of_branch(module: nn.Module) -> nn.BatchNorm2d | None:
    """Return the last normalization of a residual branch, None without a branch."""
    adds = isinstance(module, (BasicBlock, Bottleneck))
    adds = adds or (isinstance(module, (InvertedResidual, MBConv)) and module.use_res_connect)
    adds = adds or (isinstance(module, _Residual) and module.add)
    if not adds:
        return None
    body = [part for name, part in module.named_children() if name != "downsample"]
    norms = [m for part in body for m in part.modules() if isinstance(m, nn.BatchNorm2d)]
    return norms[-1]


def export(network: Any, batch: int, path: Path, size: int = 224) -> None:  # noqa: ANN401
    """Write a network as ONNX with a fixed batch."""
    example = torch.randn(batch, 3, size, size, device=next(network.parameters()).device)
    torch.backends.mha.set_fastpath_enabled(False)  # it is one operator that ONNX has not
    torch.onnx.export(
        network,
        (example,),
        str(path),
        input_names=["x"],
        output_names=["y"],
        opset_version=17,
        dynamo=False,
    )


def floors_us(
    network: Any,  # noqa: ANN401
    x: Tensor,
    item_bytes: int,
    peak_tflops: float,
    memory_tbps: float,
) -> float:
    """Return the roofline time of convolutions and GEMMs, layer by layer.

    Each takes max(FLOPs at `peak_tflops`, operands and result once at `memory_tbps`). Attention,
    pooling and element-wise operations are not counted.
    """
    total = [0.0]

    def count(module: nn.Module, inputs: tuple[Tensor, ...], result: Tensor) -> None:
        weights = module.weight
        depth = weights.numel() // weights.shape[0]
        flops = 2 * result.numel() * depth
        moved = (inputs[0].numel() + weights.numel() + result.numel()) * item_bytes
        total[0] += max(flops / peak_tflops, moved / memory_tbps) * 1e-6

    kinds = (nn.Conv2d, nn.Linear)
    hooks = [
        module.register_forward_hook(count)
        for module in network.modules()
        if isinstance(module, kinds)
    ]
    with torch.no_grad():
        network(x)
    for hook in hooks:
        hook.remove()
    return total[0]


def _vit_small() -> nn.Module:
    network = torchvision.models.VisionTransformer(
        image_size=224, patch_size=16, num_layers=12, num_heads=6, hidden_dim=384, mlp_dim=1536
    )
    nn.init.normal_(network.heads.head.weight, std=0.05)  # it begins with zeros
    return network


class _Block(nn.Sequential):
    """Convolution, batch norm, SiLU."""

    def __init__(self, channels: int, filters: int, taps: int = 1, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(channels, filters, taps, stride, taps // 2, bias=False),
            nn.BatchNorm2d(filters),
            nn.SiLU(),
        )


class _Residual(nn.Module):
    """Two 3x3 blocks, with a residual if `add`."""

    def __init__(self, channels: int, add: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(_Block(channels, channels, 3), _Block(channels, channels, 3))
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.add else self.body(x)


class _C2f(nn.Module):
    """C2f: half of the channels pass a chain of blocks; all results are concatenated."""

    def __init__(self, channels: int, filters: int, depth: int, add: bool) -> None:
        super().__init__()
        half = filters // 2
        self.enter = _Block(channels, filters)
        self.chain = nn.ModuleList(_Residual(half, add) for _ in range(depth))
        self.leave = _Block((2 + depth) * half, filters)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.enter(x).chunk(2, 1))
        for block in self.chain:
            parts.append(block(parts[-1]))
        return self.leave(torch.cat(parts, 1))


class _Spp(nn.Module):
    """SPPF: three poolings in sequence, concatenated."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.enter = _Block(channels, channels // 2)
        self.pool = nn.MaxPool2d(5, 1, 2)
        self.leave = _Block(channels * 2, channels)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.enter(x)]
        for _ in range(3):
            parts.append(self.pool(parts[-1]))
        return self.leave(torch.cat(parts, 1))


class _Head(nn.Module):
    """Boxes (four sides of 16 bins) and class scores of each cell of one scale."""

    def __init__(self, channels: int, classes: int = 80) -> None:
        super().__init__()
        self.boxes = nn.Sequential(_Block(channels, 64, 3), _Block(64, 64, 3), nn.Conv2d(64, 64, 1))
        self.classes = nn.Sequential(
            _Block(channels, classes, 3),
            _Block(classes, classes, 3),
            nn.Conv2d(classes, classes, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.boxes(x), self.classes(x)], 1).flatten(2)


class _Yolo(nn.Module):
    """Returns (N, 64 + 80, cells) of three scales: bins of boxes and class scores."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _Block(3, 16, 3, 2), _Block(16, 32, 3, 2), _C2f(32, 32, 1, add=True)
        )
        self.stage3 = nn.Sequential(_Block(32, 64, 3, 2), _C2f(64, 64, 2, add=True))
        self.stage4 = nn.Sequential(_Block(64, 128, 3, 2), _C2f(128, 128, 2, add=True))
        self.stage5 = nn.Sequential(_Block(128, 256, 3, 2), _C2f(256, 256, 1, add=True), _Spp(256))
        self.up = nn.Upsample(scale_factor=2)
        self.top4 = _C2f(384, 128, 1, add=False)
        self.top3 = _C2f(192, 64, 1, add=False)
        self.down3 = _Block(64, 64, 3, 2)
        self.low4 = _C2f(192, 128, 1, add=False)
        self.down4 = _Block(128, 128, 3, 2)
        self.low5 = _C2f(384, 256, 1, add=False)
        self.heads = nn.ModuleList(_Head(channels) for channels in (64, 128, 256))

    def forward(self, x: Tensor) -> Tensor:
        p3 = self.stage3(self.stem(x))
        p4 = self.stage4(p3)
        p5 = self.stage5(p4)
        t4 = self.top4(torch.cat([self.up(p5), p4], 1))
        t3 = self.top3(torch.cat([self.up(t4), p3], 1))
        l4 = self.low4(torch.cat([self.down3(t3), t4], 1))
        l5 = self.low5(torch.cat([self.down4(l4), p5], 1))
        predictions = [head(scale) for head, scale in zip(self.heads, (t3, l4, l5), strict=True)]
        boxes, classes = torch.cat(predictions, 2).split((64, 80), 1)
        return torch.cat([boxes, classes.sigmoid()], 1)


NETWORKS: dict[str, Callable[[], Any]] = {"vit_small": _vit_small, "yolo8n": _Yolo}
