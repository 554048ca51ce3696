"""A model file of any format, what an exporter makes of it, and the log of one that failed."""

import hashlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from device.files import sha256_of
from toolkit.errors import BuildError, ImportModelError


@dataclass(frozen=True, slots=True)
class ModelPath:
    """A model on disk: a file, or the folder of a SavedModel.

    `inputs_as_nchw`: give inputs [N,H,W,C] of TensorFlow the layout [N,C,H,W].
    """

    path: Path
    inputs_as_nchw: bool = False


@dataclass(frozen=True, slots=True)
class Exported:
    """An ONNX file in memory. `notes` say which exporter made it."""

    data: bytes = field(repr=False)
    notes: tuple[str, ...] = ()


def check_not_model(path: Path | None, model: Path | None) -> None:
    """Check that a file to write is not the model that is read. Raises BuildError."""
    if path is None or model is None or not (path.exists() and model.exists()):
        return
    if path.samefile(model):
        raise BuildError(f"{path} is the model itself; write to another file.")


def model_sha256(path: Path) -> str:
    """Return the SHA-256 of a file; of a folder, that of the names and contents of its files.

    Raises ImportModelError: it cannot be read.
    """
    try:
        if path.is_file():
            return sha256_of(path)
        if not path.is_dir():
            path.stat()  # says what is wrong
            raise ImportModelError(f"Cannot read the model {path}: it is no file; check the path.")
        digest = hashlib.sha256()
        for part in sorted(part for part in path.rglob("*") if part.is_file()):
            digest.update(f"{sha256_of(part)} {part.relative_to(path).as_posix()}\n".encode())
        return digest.hexdigest()
    except OSError as err:
        raise ImportModelError(
            f"Cannot read the model {path}: {err.strerror}; check the path."
        ) from err


def keep_log(name: str, text: str) -> Path:
    """Write what an exporter printed to a new file in the system's folder for such files."""
    with tempfile.NamedTemporaryFile(
        "w", prefix=f"tandem-export-{Path(name).name}-", suffix=".log", delete=False
    ) as file:
        file.write(text)
    return Path(file.name)
