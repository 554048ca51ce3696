"""Whether engine, pipeline.toml and labels fit together: at `tandem bundle` and at every start.

It needs neither OpenCV nor a session.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from device.engine.manifest import Dim, DimRange, TensorInfo
from device.engine.preprocessing import Preprocessing, differences
from device.errors import PipelineError
from pipelines.config import PipelineConfig, PipelineModel
from pipelines.stages.decode import constant_inputs
from pipelines.stages.decoder_check import check_outputs
from pipelines.stages.scene import check_scene

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
    settings = ", ".join(f"{name} = {text}" for name, text in different.items())
    which = f", model {model.name!r}," if config.models else ""
    sentence = (
        f"[preprocess] of pipeline {config.name!r}{which} is not the preprocessing that the engine"
        f" was calibrated with, which has {settings}"
    )
    if different.keys() <= _GEOMETRY:
        return f"{sentence}: set it so, or expect less accuracy."
    raise PipelineError(f"{sentence}: set it so, or calibrate with that of the pipeline.")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is known of an engine without running it, and the labels of its model."""

    inputs: Sequence[TensorInfo]
    outputs: Sequence[TensorInfo]
    labels: Sequence[str]
    dims: Sequence[DimRange] = ()
    preprocessing: Preprocessing | UnsetType = UNSET


def check_engines(config: PipelineConfig, engines: Mapping[str, EngineFacts]) -> list[str]:
    """Return what is to be warned of; `engines`: by the name of their model.

    Raises PipelineError: there is none for one of [[models]], or it does not fit.
    """
    networks = config.networks
    for network in networks:
        if network.name not in engines:
            raise PipelineError(
                f"the model {network.name!r} of pipeline {config.name!r} has no engine: write "
                "`engine` and `labels` in its table of [[models]]."
            )
    check_scene(config, engines[config.followed.name].labels)
    warnings = []
    for network in networks:
        engine = engines[network.name]
        check_model(config, network, engine.inputs, engine.outputs, engine.labels, engine.dims)
        if network.on:
            check_objects(network, engines[network.on].labels)
        if network.replaces and tuple(engine.labels) != tuple(engines[network.replaces].labels):
            raise PipelineError(
                f"the model {network.name!r} has other labels than {network.replaces!r}, which it "
                "replaces: objects would change their classes; use models of the same classes."
            )
        warnings.append(check_preprocessing(config, engine.preprocessing, network))
    return [warning for warning in warnings if warning is not None]


def check_model(  # noqa: PLR0917
    config: PipelineConfig,
    model: PipelineModel,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    labels: Sequence[str],
    dims: Sequence[DimRange] = (),
) -> None:
    """Raise PipelineError unless an engine with these tensors can be this model of a pipeline."""
    try:
        _check_input(model, inputs, {dim.name: dim for dim in dims})
        single = _of_one_image(outputs, inputs[0].shape[0])
        check_outputs(model.reading, model.feeding, single, labels)
    except PipelineError as error:
        which = f", model {model.name!r}" if config.models else ""
        raise PipelineError(f"pipeline {config.name!r}{which}: {error}") from error


def check_objects(model: PipelineModel, labels: Sequence[str]) -> None:
    """Raise PipelineError unless the classes of a model's crops are labels of its detector."""
    if unknown := [name for name in model.classes if name not in labels]:
        raise PipelineError(
            f"the model {model.name!r} takes crops of the class {unknown[0]!r}, which is none of"
            f" the labels of {model.on!r} ({', '.join(labels)}): correct `classes`."
        )


def _check_input(
    model: PipelineModel, inputs: Sequence[TensorInfo], dims: dict[str, DimRange]
) -> None:
    expected, dtype = model.feeding.input_shape, model.feeding.dtype
    constant = constant_inputs(model.reading, model.feeding)
    inputs = [info for info in inputs if info.name not in constant]
    if len(inputs) != 1:
        names = ", ".join(info.name for info in inputs)
        raise PipelineError(
            f"the engine takes {len(inputs)} inputs ({names}) where a pipeline gives one image:"
            " export the model with a single image input."
        )
    shape = inputs[0].shape
    fits = len(shape) == 4 and all(
        not isinstance(dim, int) or dim == size
        for dim, size in zip(shape[1:], expected[1:], strict=True)
    )
    if not fits or inputs[0].dtype != dtype:
        raise PipelineError(
            f"the engine's input {inputs[0].name!r} is {inputs[0].dtype} {list(shape)} where"
            f" [preprocess] gives {dtype} {list(expected)}: correct width, height, layout, color"
            " or dtype there."
        )
    for name, size in zip(shape[1:], expected[1:], strict=True):
        dim = dims.get(name) if isinstance(name, str) else None
        if dim is not None and not (dim.min <= size <= dim.max and size % dim.step == 0):
            steps = f" in steps of {dim.step}" if dim.step > 1 else ""
            raise PipelineError(
                f"the engine's input {inputs[0].name!r} takes {dim.min} to {dim.max}{steps} for"
                f" {name!r} where [preprocess] gives {size}: correct width and height there, or"
                f" use `tandem build --dim {name}=MIN:OPT:MAX`."
            )


def _of_one_image(outputs: Sequence[TensorInfo], batch: Dim) -> list[TensorInfo]:
    """Return what one image of a batch gives.

    Raises PipelineError: an output does not have the batch as its first dimension.
    """
    for info in outputs:
        if isinstance(batch, int) and batch > 1 and info.shape[:1] != (batch,):
            raise PipelineError(
                f"the engine takes batches of {batch} images, and its output {info.name!r}"
                f" {list(info.shape)} does not say which image each row is of: build the engine"
                " with a batch of 1."
            )
    return [
        msgspec.structs.replace(info, shape=(1, *info.shape[1:]))
        if batch is not None and info.shape[:1] == (batch,)
        else info
        for info in outputs
    ]
