"""Sources of the DLA rules, and the sets of precisions and generations in them."""

from device.engine.manifest import Precision
from toolkit.dla.rules.rule import Generation

GUIDE = "TensorRT DLA layer restrictions"
GUIDE_RUNTIME = "TensorRT guide, DLA runtime configuration"
GUIDE_85 = "TensorRT 8.5 developer guide"
HEADER = "NvInfer.h 10.3"
HEADER_85 = "NvInfer.h 8.5"
MATRIX = "DLA operator matrix, June 2024"
FAQ = "DLA software FAQ, June 2024"
ONNX_TABLE = "TensorRT ONNX operator table"
JETPACKS = "JetPack release notes"

INT8: tuple[Precision, ...] = ("int8",)
FP16: tuple[Precision, ...] = ("fp16",)
V1: tuple[Generation, ...] = ("v1",)
V2: tuple[Generation, ...] = ("v2",)
