"""The choices of options, as literals: the modules that implement them load onnx and numpy.

`tests/repository/test_architecture.py` holds each against its table.
"""

from typing import Literal

Switch = Literal["auto", "on", "off"]

AUTO = "auto"
CALIBRATION_METHODS = ("minmax", "entropy", "percentile", "mse")
QDQ_FORMS = ("tensorrt-gpu", "tensorrt-dla", "onnxruntime")
PREPROCESSINGS = (
    "yolo", "yolo-classify", "rtdetr", "imagenet", "timm", "timm-half", "clip", "segmentation",
    "unit", "raw",
)  # fmt: skip
PLAN_SECONDS = 10.0
