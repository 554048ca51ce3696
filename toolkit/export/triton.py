"""An engine as a model of a Triton repository.

NAME/config.pbtxt      what clients see, and how requests are batched
NAME/VERSION/          model.onnx for Triton's onnxruntime, or model.engine for `tandem serve`
NAME/tensorrt/         models and trtexec scripts, of which a board with TensorRT makes model.plan
"""

from dataclasses import dataclass
from pathlib import Path

from device.engine.file import open_engine
from device.errors import TandemError
from pipelines.serving.instances import ports_of_engine
from pipelines.serving.messages import message
from pipelines.serving.model_config import CONFIG, complete, write_config
from toolkit.export.folder import export_trtexec, new_folder, write_model
from toolkit.export.joined_network import joined_model


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """A model that was written; `problem`: why it has no scripts for TensorRT."""

    folder: Path
    max_batch_size: int
    problem: str = ""


def export_triton(engine_path: Path, repository: Path) -> ExportedModel:
    """Write an engine as a model of a repository, called like its file.

    Raises BuildError: the model is there, or cannot be written as ONNX; EngineError.
    """
    name = engine_path.stem
    with open_engine(engine_path) as engine:
        inputs, outputs = ports_of_engine(engine.manifest)
        model = joined_model(engine)
    config = complete(message("ModelConfig")(), name, "onnxruntime_onnx", inputs, outputs)
    config.backend = "onnxruntime"
    if config.max_batch_size > 1:
        config.dynamic_batching.max_queue_delay_microseconds = 0
        config.dynamic_batching.preserve_ordering = False
    with new_folder(repository / name) as folder:
        (folder / "1").mkdir()
        write_model(folder / "1" / "model.onnx", model)
        (folder / CONFIG).write_text(write_config(config))
        problem = ""
        try:
            export_trtexec(engine_path, folder / "tensorrt")
        except TandemError as error:
            problem = str(error)
    return ExportedModel(repository / name, config.max_batch_size, problem)
