"""Opens a file as what can be run. Models need onnx and onnxruntime, engines neither."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from device.runtime.executors.protocol import ExecutorName
from device.runtime.session import Dla
from toolkit.errors import InferError
from toolkit.evaluate.infer.engine_runner import EngineRunner
from toolkit.evaluate.infer.runner import Runner, kind_of

if TYPE_CHECKING:
    from toolkit.plugins import Plugin


def open_runner(
    path: Path,
    *,
    dla: Dla = "portable",
    executor: ExecutorName = "auto",
    plugins: "Sequence[Plugin]" = (),
) -> Runner:
    """Open a model or an engine. Raises TandemError: it is neither, or cannot be loaded."""
    kind = kind_of(path)
    if kind == "engine":
        return EngineRunner(path, dla, executor)
    if kind == "model":
        if executor != "auto":
            raise InferError(f"{path} is a model, which runs in onnxruntime; build an engine of it")
        from toolkit.evaluate.infer.onnx_runner import OnnxRunner
        from toolkit.importers.onnx import read_model_file

        return OnnxRunner(read_model_file(path, plugins).model, str(path))
    raise InferError(f"{path} holds arrays; give an ONNX model or an engine to run")
