"""A pipeline's preprocessing against the one that its engine was calibrated with."""

from msgspec import UnsetType

from device.engine.preprocessing import Preprocessing, differences
from device.errors import PipelineError
from pipelines.config import PipelineConfig, PipelineModel

# These change what the image shows, which ranges hardly depend on; all others change the numbers.
_GEOMETRY = frozenset({"resize", "crop_fraction", "interpolation", "pad_value"})


def check_preprocessing(
    config: PipelineConfig,
    recorded: Preprocessing | UnsetType,
    model: PipelineModel | None = None,
) -> str | None:
    """Return a warning if the image is fitted into the input otherwise, else None.

    `model`: one of [[models]]; None: the first. Raises PipelineError: the inputs would have other
    numbers than the calibration's.
    """
    model = config.first if model is None else model
    if not recorded:
        return None
    different = differences(recorded, model.feeding)
    if not different:
        return None
    said = ", ".join(f"{name} = {text}" for name, text in different.items())
    which = f", model {model.name!r}," if config.models else ""
    sentence = (
        f"[preprocess] of pipeline {config.name!r}{which} is not the preprocessing that the engine"
        f" was calibrated with, which has {said}"
    )
    if different.keys() <= _GEOMETRY:
        return f"{sentence}: set it so, or expect less accuracy."
    raise PipelineError(f"{sentence}: set it so, or calibrate with that of the pipeline.")
