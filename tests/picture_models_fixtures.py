"""Models of wheels on pictures: the picture, and the run of a model on it."""

from pathlib import Path

import cv2
import numpy as np
import onnx
from click.testing import CliRunner
from tensorflow_fixtures import tensorflow  # noqa: F401  (a fixture)

import configs
import tandem
from device.update.bundle import ENGINE, LABELS, PIPELINE
from pipelines.config import load_model
from pipelines.sinks.draw import annotate
from toolkit.cli.main import tandem as command
from toolkit.engine.build import BuildOptions

SOURCE = 'name = "p"\n[source]\nuri = "pictures"\nframes = "every"\nrealtime = false\n'


def run(folder: Path, model: Path, picture: np.ndarray, *options: str) -> "tandem.FrameResult":
    """Guess how a model is read, build it, and run it on a picture as `tandem run` would."""
    guessed = CliRunner().invoke(
        command, ["model", "guess", str(model), *options, "--labels-out", str(folder / LABELS)]
    )
    assert guessed.exit_code == 0, guessed.exception
    (folder / PIPELINE).write_text(SOURCE + guessed.output)
    (folder / "pictures").mkdir()
    cv2.imwrite(str(folder / "pictures" / "0.png"), picture)
    toml = folder / "model.toml"
    CliRunner().invoke(command, ["model", "guess", str(model), *options, "-o", str(toml)])
    shape = load_model(toml).preprocess.input_shape
    name = onnx.load(model, load_external_data=False).graph.input[0].name
    tandem.build(model, out=folder / ENGINE, options=BuildOptions(shapes={name: shape}))
    results: list[tandem.FrameResult] = []
    frames = tandem.run_pipeline(folder, source=str(folder / "pictures"), on_result=results.append)
    assert frames == len(results) == 1
    labels = (folder / LABELS).read_text().split("\n")
    drawn = annotate(picture, results[0].decoded, labels)
    assert drawn.shape == picture.shape
    assert (drawn != picture).any()
    return results[0]


def picture_of(name: str) -> np.ndarray:
    return cv2.imread(str(configs.ROOT / "scenes" / "backgrounds" / name))
