"""torchvision where its C++ operators cannot be loaded: beside a PyTorch of another build.

PyPI's torchvision is for PyTorch with CUDA. Detectors need two of its operators, and ONNX has both;
here they are in NumPy and in torchvision's own Python, for the CPU.
"""

from importlib import import_module
from typing import Any

import numpy as np
import torch

_SIGNATURES = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, "
    "SymInt pooled_width, int sampling_ratio, bool aligned) -> Tensor",
}
# torchvision wants these to exist when it is imported; detectors do not call them.
_NAMES = ("qnms", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
_KEPT: list[object] = []  # a torch Library takes its operators with it when it is collected


def import_torchvision() -> Any:  # noqa: ANN401
    """Import torchvision, with operators of our own where its own are not there."""
    try:
        return import_module("torchvision")
    except RuntimeError:
        pass  # "operator torchvision::nms does not exist"
    library = torch.library.Library("torchvision", "FRAGMENT")
    _KEPT.append(library)
    for name, signature in _SIGNATURES.items():
        library.define(f"{name}{signature}")
    for name in _NAMES:
        library.define(f"{name}(Tensor x) -> Tensor")
    for name in (*_SIGNATURES, *_NAMES):
        library.define(f"_{name}_backward(Tensor x) -> Tensor")
    torchvision = import_module("torchvision")
    library.impl("nms", _suppress, "CPU")
    pooling = import_module("torchvision.ops.roi_align")
    library.impl("roi_align", pooling._roi_align, "CPU")
    torchvision.extension._has_ops = _has_operators
    pooling._has_ops = _has_operators
    return torchvision


def _has_operators() -> bool:
    return True


def _suppress(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Return the boxes that no better one overlaps by more than the threshold, best first."""
    boxes = dets.detach().numpy()
    sizes = np.maximum(boxes[:, 2:] - boxes[:, :2], 0)
    areas = sizes[:, 0] * sizes[:, 1]
    rest = scores.detach().argsort(descending=True, stable=True).numpy()
    indices: list[int] = []
    while len(rest):
        best, rest = rest[0], rest[1:]
        indices.append(int(best))
        low = np.maximum(boxes[best, :2], boxes[rest, :2])
        high = np.minimum(boxes[best, 2:], boxes[rest, 2:])
        common = np.prod(np.maximum(high - low, 0), axis=1)
        rest = rest[common <= iou_threshold * (areas[best] + areas[rest] - common)]
    return torch.tensor(indices, dtype=torch.int64)
