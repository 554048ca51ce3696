"""TensorFlow and Keras -> ONNX, by tf2onnx in a child process.

The child (`tensorflow_export.py`) runs in an interpreter that has tensorflow and tf2onnx: the one
that TANDEM_TENSORFLOW_PYTHON names, this one, or that of an environment in the cache folder.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

from device.install_advice import pip_install
from toolkit.errors import ImportModelError
from toolkit.importers.source import Exported, ModelPath, keep_log
from toolkit.progress import Progress

VARIABLE = "TANDEM_TENSORFLOW_PYTHON"
# They work together on Python 3.10 to 3.13, also beside Tandem's own packages.
REQUIREMENTS = ("tensorflow-cpu==2.21.0", "tf2onnx==1.17.0")
_CHILD = Path(__file__).with_name("tensorflow_export.py")


def export_saved_model(file: ModelPath, report: Progress) -> Exported:
    """Export the signature `serving_default`, or the only one, of a SavedModel.

    Raises ImportModelError.
    """
    folder = file.path if file.path.is_dir() else file.path.parent
    return _export("saved-model", ModelPath(folder, file.inputs_as_nchw), report)


def export_keras(file: ModelPath, report: Progress) -> Exported:
    """Export a .keras or .h5 file with its architecture. Raises ImportModelError."""
    return _export("keras", file, report)


def export_tflite(file: ModelPath, report: Progress) -> Exported:
    """Export a .tflite file, quantized or not. Raises ImportModelError."""
    return _export("tflite", file, report)


def cache_environment() -> Path:
    """Return the folder of the environment that is found without being named."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tandem" / "tensorflow"


def find_interpreter(name: str) -> Path:
    """Return the interpreter that exports the model `name`. Raises ImportModelError: none can."""
    if chosen := os.environ.get(VARIABLE):
        program = shutil.which(chosen)
        if program is None:
            raise ImportModelError(
                f"{VARIABLE} is {chosen!r}, which is no program; set it to the python of an "
                "environment with tensorflow and tf2onnx."
            )
        return Path(program)
    if all(importlib.util.find_spec(package) for package in ("tensorflow", "tf2onnx")):
        return Path(sys.executable)
    python = cache_environment() / "bin" / "python"
    if python.exists():
        return python
    raise ImportModelError(
        f"{name} needs tensorflow and tf2onnx, which are not installed here; "
        f"{pip_install('tensorflow')}, or make an environment of their own:\n"
        f"    python3 -m venv {cache_environment()}\n"
        f"    {python} -m pip install {' '.join(REQUIREMENTS)}\n"
        f"Elsewhere, name its python in {VARIABLE}."
    )


def _export(kind: str, file: ModelPath, report: Progress) -> Exported:
    name = file.path.name
    python = find_interpreter(name)
    with tempfile.TemporaryDirectory(prefix="tandem-export-") as folder:
        out, log = Path(folder) / "model.onnx", Path(folder) / "log"
        layout = ("--inputs-as-nchw",) if file.inputs_as_nchw else ()
        command = (python, _CHILD, kind, file.path.absolute(), out, *layout)
        with log.open("w+", errors="replace") as printed:
            last = _run([str(part) for part in command], printed, report)
        if "versions" not in last:
            text = log.read_text(errors="replace")
            lines = [line for line in text.splitlines() if line.strip()]
            raise ImportModelError(
                f"{name} cannot be exported to ONNX: {last.get('error') or lines[-1]}; "
                f"the whole log of {python} is in {keep_log(name, text)}."
            )
        versions = ", ".join(f"{key} {value}" for key, value in last["versions"].items())
        return Exported(out.read_bytes(), (f"exported to ONNX by {versions}",))


def _run(command: list[str], log: TextIO, report: Progress) -> dict[str, Any]:
    """Run the child and pass its steps on; return its last answer.

    Lines that are no answers, as an interpreter that does not work prints them, go to the log, and
    how the child ended if it did not say. Raises ImportModelError: it cannot be started.
    """
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            text=True,
            errors="replace",
        )
    except OSError as err:
        raise ImportModelError(
            f"{command[0]} cannot be started ({err.strerror}); set {VARIABLE} to the python of an "
            "environment with tensorflow and tf2onnx."
        ) from err
    last: dict[str, Any] = {}
    with child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                last = _answer(line)
                if not last:
                    print(line, end="", file=log, flush=True)
                elif "step" in last:
                    report(last["step"], last["share"])
        except BaseException:
            child.kill()
            raise
    log.seek(0, os.SEEK_END)
    if log.tell() == 0:
        status = child.returncode
        log.write(f"it ended by signal {-status}" if status < 0 else f"exit status {status}")
    return last


def _answer(line: str) -> dict[str, Any]:
    """Return what the child says in a line, {} where it is no answer."""
    try:
        answer = json.loads(line)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
