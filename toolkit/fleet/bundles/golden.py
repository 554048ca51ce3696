"""Golden inputs of a bundle: noise or pictures, with the outputs that the engine gives here.

How near a board must come is measured: every sample is run once more with each value of its picture
up to one grey level brighter or darker. That moves INT8 roundings as another processor does, and
what the engine itself does not keep then is asked of no board.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.engine.manifest import TensorInfo
from device.errors import BundleError
from device.runtime.golden import MAX_GOLDEN_SAMPLES, record_golden
from device.runtime.session import Session, open_session
from device.update.bundle import GoldenLimit
from pipelines.golden import Compared, compare_outputs
from pipelines.model_config import PipelineModel
from pipelines.pictures import PictureError, read_picture
from pipelines.stages.decode import constant_inputs
from pipelines.stages.preprocess import Preprocessor

TOLERANCE = 0.02  # of the range of an output, for boards that compare values
AGREEMENT_MARGIN = 0.05  # what a board may lose more than the engine itself
SQNR_MARGIN_DB = 6.0  # twice its difference
# A board must reach so much whatever was measured, and is asked for no more.
AGREEMENT_BOUNDS = (0.5, 0.95)
SQNR_BOUNDS_DB = (6.0, 40.0)
PICTURES = (".jpg", ".jpeg", ".png", ".bmp")

Array = NDArray[Any]


@contextmanager
def golden_of(
    engine: Path, model: PipelineModel, golden: int | Path, output: Path
) -> Iterator[tuple[Path, int, GoldenLimit]]:
    """Yield a file of a model's golden inputs beside `output`, how many samples it has, and what a
    board must reach.

    Raises BundleError: there are no pictures, or too many samples.
    """
    with open_session(engine) as session:
        images = _random(model, golden) if isinstance(golden, int) else _pictures(golden)
        if not 0 < len(images) <= MAX_GOLDEN_SAMPLES:
            raise BundleError(
                f"{len(images)} golden inputs are asked for with `tandem bundle --golden`: a "
                f"bundle takes 1 to {MAX_GOLDEN_SAMPLES}"
            )
        samples = [_feeds(session, model, image) for image in images]
        limit = _measured_limit(session, model, images, samples)
        path = output.with_name(f".{output.name}.{secrets.token_hex(8)}.npz")
        try:
            record_golden(session, samples, path)
            yield path, len(samples), limit
        finally:
            path.unlink(missing_ok=True)


def limit_of(compared: Compared) -> GoldenLimit:
    """Return what a board must reach, by what the engine itself keeps when its inputs change a
    little."""
    least, most = AGREEMENT_BOUNDS
    least_db, most_db = SQNR_BOUNDS_DB
    return GoldenLimit(
        task=compared.task,
        min_agreement=round(min(most, max(least, compared.agreement - AGREEMENT_MARGIN)), 4),
        min_sqnr_db=round(min(most_db, max(least_db, compared.sqnr_db - SQNR_MARGIN_DB)), 1),
        measured_agreement=round(compared.agreement, 4),
        measured_sqnr_db=round(compared.sqnr_db, 1),
    )


def _measured_limit(
    session: Session,
    model: PipelineModel,
    images: Sequence[Array],
    samples: Sequence[Mapping[str, Array]],
) -> GoldenLimit:
    chance = np.random.default_rng(1)
    shaken = [_feeds(session, model, _shaken(image, chance)) for image in images]
    recorded, actual = (
        [{name: np.array(value) for name, value in session.infer(dict(feeds)).items()}
         for feeds in rows]
        for rows in (samples, shaken)
    )  # fmt: skip
    return limit_of(compare_outputs(model, recorded, actual))


def _shaken(image: Array, chance: np.random.Generator) -> Array:
    """Return a picture whose values are up to one grey level brighter or darker."""
    noise = chance.integers(-1, 2, image.shape, np.int16)
    shaken: Array = np.clip(image.astype(np.int16) + noise, 0, 255).astype(np.uint8)
    return shaken


def _random(model: PipelineModel, count: int) -> list[Array]:
    """Return pictures of noise, the same for the same numbers."""
    rng = np.random.default_rng(0)
    shape = (model.feeding.height, model.feeding.width, 3)
    return [
        rng.integers(0, 256, shape, np.uint8) for _ in range(min(count, MAX_GOLDEN_SAMPLES + 1))
    ]


def _pictures(folder: Path) -> list[Array]:
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES)
    images: list[Array] = []
    for path in paths[: MAX_GOLDEN_SAMPLES + 1]:
        try:
            images.append(read_picture(path))
        except (PictureError, OSError) as error:
            raise BundleError(f"{path} cannot be read as a picture: {error}") from error
    return images


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
