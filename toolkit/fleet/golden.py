"""Golden inputs of a bundle: noise or pictures, with the outputs that the engine gives here."""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.engine.manifest import TensorInfo
from device.errors import BundleError
from device.runtime.golden import record_golden
from device.runtime.session import Session, open_session
from pipelines.model_config import PipelineModel
from pipelines.stages.decoder_inputs import constant_inputs
from pipelines.stages.preprocess import Preprocessor
from pipelines.vision import cv2

TOLERANCE = 0.02  # of the range of an output: processors round INT8 sums differently
MAX_SAMPLES = 64
PICTURES = (".jpg", ".jpeg", ".png", ".bmp")

Array = NDArray[Any]


@contextmanager
def golden_of(
    engine: Path, model: PipelineModel, golden: int | Path, output: Path
) -> Iterator[tuple[Path, int]]:
    """Yield a file of a model's golden inputs beside `output`, and how many samples it has.

    Raises BundleError: there are no pictures, or too many samples.
    """
    with open_session(engine) as session:
        samples = (
            _random(session, model, golden)
            if isinstance(golden, int)
            else _pictures(session, model, golden)
        )
        if not 0 < len(samples) <= MAX_SAMPLES:
            raise BundleError(
                f"{len(samples)} golden inputs are asked for with `tandem bundle --golden`: a "
                f"bundle takes 1 to {MAX_SAMPLES}"
            )
        path = output.with_name(f".{output.name}.{secrets.token_hex(8)}.npz")
        try:
            record_golden(session, samples, path)
            yield path, len(samples)
        finally:
            path.unlink(missing_ok=True)


def _random(session: Session, model: PipelineModel, count: int) -> list[Mapping[str, Array]]:
    """Return pictures of noise, the same for the same numbers."""
    rng = np.random.default_rng(0)
    height, width = model.feeding.input_shape[-2:]
    return [
        _feeds(session, model, rng.integers(0, 256, (height, width, 3), np.uint8))
        for _ in range(min(count, MAX_SAMPLES + 1))
    ]


def _pictures(session: Session, model: PipelineModel, folder: Path) -> list[Mapping[str, Array]]:
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES)
    samples: list[Mapping[str, Array]] = []
    for path in paths[: MAX_SAMPLES + 1]:
        image = cv2.imread(str(path))
        if image is None:
            raise BundleError(f"{path} cannot be read as a picture")
        samples.append(_feeds(session, model, image))
    return samples


def _feeds(session: Session, model: PipelineModel, image: Array) -> dict[str, Array]:
    """Return the engine's inputs for a picture, uint8 [H, W, 3] BGR, as the pipeline makes them."""
    blob = np.zeros((1, *model.feeding.input_shape[1:]), model.feeding.dtype)
    Preprocessor(model.feeding, blob).run(image)
    constants = constant_inputs(model.reading, model.feeding)
    return {info.name: constants.get(info.name, blob) for info in _fixed(session.inputs)}


def _fixed(inputs: tuple[TensorInfo, ...]) -> tuple[TensorInfo, ...]:
    for info in inputs:
        if isinstance(info.shape[0], int) and info.shape[0] != 1:
            raise BundleError(
                f"golden inputs need an engine for one picture at a time, its input {info.name} "
                f"takes {info.shape[0]}: leave out `tandem bundle --golden`"
            )
    return inputs
