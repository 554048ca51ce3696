"""Formats of models: by what a file is known, and what makes ONNX of it.

A file of none of these formats is taken to be ONNX.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from toolkit.errors import ImportModelError
from toolkit.importers.pytorch import export_pt2, refuse_pickle
from toolkit.importers.source import Exported, ModelPath
from toolkit.importers.tensorflow import export_keras, export_saved_model, export_tflite
from toolkit.progress import Progress


@dataclass(frozen=True, slots=True)
class Format:
    """One format: `marker` is the ending of a file, or the name of a file in a folder.

    `export` makes ONNX of it, or raises ImportModelError with the reason. `nhwc`: its pictures
    have the channels last.
    """

    marker: str
    title: str
    export: Callable[[ModelPath, Progress], Exported]
    nhwc: bool = False


def _refuse_weights(file: ModelPath, report: Progress) -> NoReturn:
    raise ImportModelError(
        f"{file.path.name} holds weights without a network; load them into the network in Python "
        "and give that to tandem.build(module, example_inputs), or export it to ONNX or .pt2."
    )


FORMATS = (
    Format(".pt2", "PyTorch program", export_pt2),
    Format(".pt", "PyTorch pickle or TorchScript", refuse_pickle),
    Format(".pth", "PyTorch pickle or TorchScript", refuse_pickle),
    Format(".torchscript", "PyTorch TorchScript", refuse_pickle),
    Format(".safetensors", "weights", _refuse_weights),
    Format("saved_model.pb", "TensorFlow SavedModel", export_saved_model, nhwc=True),
    Format(".keras", "Keras 3", export_keras, nhwc=True),
    Format(".h5", "Keras HDF5", export_keras, nhwc=True),
    Format(".hdf5", "Keras HDF5", export_keras, nhwc=True),
    Format(".tflite", "TensorFlow Lite", export_tflite, nhwc=True),
)


def format_of(path: Path) -> Format | None:
    """Return the format of a model, None for ONNX. A folder is known by the file in it."""
    if path.is_dir():
        return next((row for row in FORMATS if (path / row.marker).is_file()), None)
    return next((row for row in FORMATS if row.marker in (path.suffix.lower(), path.name)), None)


def export_to_onnx(file: ModelPath, report: Progress) -> Exported | None:
    """Make ONNX of a model of another format; None where it is ONNX already.

    Raises ImportModelError: the model is missing, its exporter is not installed, or cannot
    export it.
    """
    path = file.path
    kind = format_of(path)
    if file.inputs_as_nchw and (kind is None or not kind.nhwc):
        raise ImportModelError(
            f"{path.name} is {kind.title if kind else 'ONNX'}, whose inputs stay as they are; "
            "`tandem build --inputs-as-nchw` is for TensorFlow and Keras."
        )
    if kind is None:
        if path.is_dir():
            raise ImportModelError(
                f"{path} is a folder without saved_model.pb, so it is no SavedModel; "
                "give a model file, or the folder that tf.saved_model.save or model.export wrote."
            )
        return None
    if not path.exists():
        raise ImportModelError(f"Cannot read the model {path}: there is none; check the path.")
    return kind.export(file, report)
