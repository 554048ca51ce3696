"""Step 12 of the build: the engine takes its name only once it is proven to load and run."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibration.dataset import Sample
from device.engine.file import write_engine
from device.engine.manifest import Manifest
from device.errors import EngineError, SessionError
from device.files import sync_folder
from device.runtime.session import open_session
from toolkit.errors import BuildError, first_line

Outputs = Mapping[str, np.ndarray[Any, Any]]


def check_destination(path: Path, model: Path | None) -> None:
    """Check the output path before the build starts; raises BuildError."""
    if path.is_dir():
        raise BuildError(
            f"{path} is a folder; name the engine's file, such as {path / 'm.engine'}."
        )
    if not path.parent.is_dir():
        raise BuildError(f"{path} cannot be written: there is no folder {path.parent}; make it.")
    if not os.access(path.parent, os.W_OK):
        raise BuildError(f"{path} cannot be written: {path.parent} is not writable; use another.")
    if model is not None and path.exists() and model.exists() and path.samefile(model):
        raise BuildError(f"{path} is the model itself; give the engine another name.")


def write_proven(
    path: Path,
    manifest: Manifest,
    entries: Mapping[str, np.ndarray[Any, Any]],
    *,
    model: str,
    samples: Sequence[Sample],
    accept: Callable[[Sequence[Outputs]], Manifest],
) -> Manifest:
    """Write the engine under its final name once its segments load and run `samples`.

    `model` is what errors call the model; `accept` raises if the outputs may not be, and returns
    the manifest with what they showed. Returns that manifest. Raises BuildError and leaves no file.
    """
    unproven = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unproven")
    try:
        write_engine(unproven, manifest, entries)
        with open_session(unproven) as session:
            accepted = accept([session.infer(sample) for sample in samples])
        if accepted != manifest:
            write_engine(unproven, accepted, entries)
        unproven.replace(path)
        sync_folder(path.parent)
        return accepted
    except SessionError as err:
        detail = first_line(err.__cause__) if err.__cause__ else str(err)
        raise BuildError(
            f"{model} cannot be run: {detail.replace(str(unproven), path.name)}; check that "
            "onnxruntime runs it with inputs of these shapes (--shape gives others)."
        ) from err
    except EngineError as err:
        cause = err.__cause__
        if isinstance(cause, OSError):
            raise BuildError(
                f"{path} cannot be written: {cause.strerror}; make room there or use another place."
            ) from err
        raise BuildError(f"{path} {err}".replace(f"{unproven} ", "")) from err
    except OSError as err:  # of the name alone: a mount, or a file of another user
        raise BuildError(
            f"{path} cannot take the engine: {err.strerror}; give it another name or place."
        ) from err
    finally:
        unproven.unlink(missing_ok=True)
