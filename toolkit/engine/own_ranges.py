"""The INT8 ranges that a Q/DQ model brings along, and what to do where they cannot be taken."""

from pathlib import Path

from toolkit.errors import ImportModelError
from toolkit.importers.onnx import ImportedModel
from toolkit.quantize.qdq.importer import PlainModel, import_qdq

# Of a MobileNet in INT8, all 30 activations have a zero point, and 28 of them -128.
TFLITE_INT8 = (
    "TensorFlow Lite gives activations a zero point, and the INT8 of TensorRT and of the DLA has "
    "none: what follows a ReLU would lose one of 8 bits. For an INT8 engine give the float model "
    "(Keras, SavedModel or a float .tflite) with `tandem build --data`; this file builds with "
    "`tandem build --precision fp16` or fp32."
)


def without_qdq(imported: ImportedModel) -> PlainModel:
    """Return a Q/DQ model as a float model with its ranges; any scale of weights is taken.

    Raises ImportModelError: its Q/DQ are not such as INT8 engines have.
    """
    try:
        return import_qdq(imported.model, any_weight_scale=True)
    except ImportModelError as err:
        if Path(imported.name).suffix.lower() != ".tflite":
            raise
        raise ImportModelError(f"{imported.name}: {TFLITE_INT8} In detail: {err}") from err
