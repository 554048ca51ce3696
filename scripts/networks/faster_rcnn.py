"""Faster R-CNN (Ren et al., 2015) with a feature pyramid, as torchvision defines and exports it.

Weights are random, the same in each call, and conditioned as in `scripts/gpu_networks.py`. Plain
random heads detect nothing; theirs are scaled, so that objects, boxes and classes differ.
"""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

OUTPUTS = ("boxes", "labels", "scores")
_PICTURES = 2  # that normalizations take their statistics from
_PICTURE_SIDE = 320  # at most
# Of heads: random ones give every anchor and every class nearly the same. With larger factors the
# scores of the best boxes are all 1, and their order says nothing.
_OBJECTNESS, _BOXES, _CLASSES = 10.0, 10.0, 2.0


def make_network(backbone: str = "resnet50", side: int = 800) -> Any:  # noqa: ANN401
    """Return the detector for square images, in evaluation mode on the CPU."""
    import torch

    from scripts.torchvision_operators import import_torchvision

    import_torchvision()
    from torchvision.models.detection import FasterRCNN, fasterrcnn_resnet50_fpn
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    from scripts.gpu_networks import condition, pictures

    torch.manual_seed(0)
    sizes = {"min_size": side, "max_size": side}
    if backbone == "resnet50":
        network = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, **sizes)
    else:
        features = resnet_fpn_backbone(
            backbone_name=backbone, weights=None, norm_layer=torch.nn.BatchNorm2d
        )
        network = FasterRCNN(features, num_classes=91, **sizes)
    condition(network)
    network.eval()
    seen = torch.from_numpy(pictures(_PICTURES, min(side, _PICTURE_SIDE), np.random.default_rng(0)))
    norms = [module for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:
            norm.train()
        network.backbone(seen)
        network.rpn.head.cls_logits.weight *= _OBJECTNESS
        network.rpn.head.bbox_pred.weight *= _BOXES
        network.roi_heads.box_predictor.cls_score.weight *= _CLASSES
    return network.eval()


def export(network: Any, side: int, path: Path) -> None:  # noqa: ANN401
    """Write the network as ONNX: input `image` (3, side, side), outputs as OUTPUTS."""
    import torch

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # tracing fixes sizes, which is what is wanted
        torch.onnx.export(
            network,
            ([torch.from_numpy(image(side))],),
            str(path),
            input_names=["image"],
            output_names=list(OUTPUTS),
            opset_version=17,
            dynamo=False,
        )


def image(side: int, seed: int = 1) -> np.ndarray:
    """Return a float32 image (3, side, side) with structure."""
    from scripts.torchvision_operators import import_torchvision

    import_torchvision()
    from scripts.gpu_networks import pictures

    return pictures(1, side, np.random.default_rng(seed))[0]


def faster_rcnn(side: int, batch: int = 1, backbone: str = "resnet50") -> ir.Model:
    """Return the exported detector; it takes one image."""
    if batch != 1:
        raise SystemExit(f"Faster R-CNN takes one image, not {batch}")
    with tempfile.TemporaryDirectory(prefix="faster-rcnn-") as folder:
        path = Path(folder) / "m.onnx"
        export(make_network(backbone, side), side, path)
        model = ir.load(path)
        ir.external_data.load_to_model(model)
        return model
