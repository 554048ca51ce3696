"""Public networks rebuilt as ONNX graphs with random weights, to check plans and costs.

Every network is written from its paper or reference code; `tests/importers/test_networks.py`
compares their parameters and multiply-accumulates with the published ones. Write one with
`python -m scripts.networks NAME FILE [--side S]`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from scripts.networks import (
    classic,
    compact,
    darknet,
    faster_rcnn,
    mobile,
    retinanet,
    segmentation,
    ssd,
    transformers,
    yolo,
    yolov7,
    yolox,
)


@dataclass(frozen=True)
class Network:
    """How to build one network; `side` None: its input size is fixed (`build` takes no side)."""

    build: Callable[..., ir.Model]
    side: int | None = None

    def model(self, batch: int = 1, side: int | None = None) -> ir.Model:
        """Return the model at a batch and, where it can be chosen, an input side in pixels."""
        if self.side is None:
            return self.build(batch=batch)
        return self.build(side=side or self.side, batch=batch)


NETWORKS: dict[str, Network] = {
    "alexnet": Network(classic.alexnet),
    "googlenet": Network(classic.googlenet),
    "vgg16": Network(partial(classic.vgg, 16)),
    "vgg19": Network(partial(classic.vgg, 19)),
    "resnet18": Network(partial(classic.resnet, 18)),
    "resnet34": Network(partial(classic.resnet, 34)),
    "resnet50": Network(partial(classic.resnet, 50)),
    "resnet101": Network(partial(classic.resnet, 101)),
    "resnet152": Network(partial(classic.resnet, 152)),
    "resnet34_backbone": Network(partial(classic.resnet, 34, side=(768, 1280), head=False)),
    **{f"densenet{d}": Network(partial(classic.densenet, d)) for d in (121, 161, 169, 201)},
    "mobilenet_v1": Network(classic.mobilenet_v1),
    "mobilenet_v2": Network(classic.mobilenet_v2),
    "squeezenet": Network(compact.squeezenet, 224),
    "shufflenet_v2": Network(compact.shufflenet_v2, 224),
    **{
        f"shufflenet_v2_x{width.replace('.', '_')}": Network(
            partial(compact.shufflenet_v2, width=width), 224
        )
        for width in ("0.5", "1.5", "2.0")
    },
    "mobilenet_v3": Network(mobile.mobilenet_v3, 224),
    "efficientnet_lite0": Network(classic.efficientnet_lite0),
    "efficientnet_b0": Network(mobile.efficientnet_b0, 224),
    "vit_small": Network(transformers.vit_small, 224),
    "encoder": Network(transformers.encoder),
    "deeplab": Network(segmentation.deeplab, 512),
    "unet": Network(classic.unet, 512),
    "ssd_mobilenet_v1": Network(ssd.ssd_mobilenet_v1),
    "ssd_resnet34": Network(ssd.ssd_resnet34),
    "retinanet_resnext50": Network(partial(retinanet.retinanet, "resnext50", 264)),
    "retinanet_resnet34": Network(partial(retinanet.retinanet, "resnet34", 3, side=(768, 1280))),
    **{f"yolov5{s}": Network(partial(yolo.yolov5, s), 640) for s in "nsm"},
    **{f"yolov8{s}": Network(partial(yolo.yolov8, s), 640) for s in "nsm"},
    **{f"yolov9{s}": Network(partial(yolo.yolov9, s), 640) for s in "tsm"},
    **{f"yolov10{s}": Network(partial(yolo.yolov10, s), 640) for s in "nsm"},
    **{f"yolo11{s}": Network(partial(yolo.yolo11, s), 640) for s in "nsmlx"},
    **{f"yolo26{s}": Network(partial(yolo.yolo11, s, version=26), 640) for s in "nsmlx"},
    **{f"yolox_{s}": Network(partial(yolox.yolox, s), 640) for s in "ntsm"},
    "yolov7_tiny": Network(yolov7.yolov7_tiny, 640),
    "yolov7": Network(yolov7.yolov7, 640),
    "yolov2": Network(darknet.yolov2, 416),
    "yolov2_tiny": Network(darknet.yolov2_tiny, 416),
    "yolov3": Network(darknet.yolov3, 416),
    "yolov3_tiny": Network(darknet.yolov3_tiny, 416),
    "yolov4": Network(darknet.yolov4, 416),
    "yolov4_tiny": Network(darknet.yolov4_tiny, 416),
}

# Not rebuilt but exported by PyTorch, which writing one of them needs (extra `dev`).
EXPORTED: dict[str, Network] = {
    "faster_rcnn_resnet18": Network(partial(faster_rcnn.faster_rcnn, backbone="resnet18"), 800),
    "faster_rcnn_resnet50": Network(faster_rcnn.faster_rcnn, 800),
}
