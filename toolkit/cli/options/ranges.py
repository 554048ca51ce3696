"""The files that `tandem calibrate` and `tandem ranges` write."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.cli.command import option
from toolkit.cli.options.choices import QdqForm


@dataclass(frozen=True, slots=True)
class RangeOutputs:
    """Forms of the ranges, and models that hold them."""

    cache: Path | None = option("Write a TensorRT cache.")
    tensorrt: str | None = option(
        "TensorRT that reads the cache. [default: that of the cache read, else 10.3.0]",
        metavar="VERSION",
    )
    qdq: Path | None = option("Write the model with Q/DQ.")
    qdq_for: QdqForm = option(
        "Reader of the Q/DQ model; onnxruntime computes the bits of the engine.",
        default="tensorrt-gpu",
    )
    adjusted_model: Path | None = option(
        "Write the plain model with equalised and rounded weights and corrected biases."
    )
