"""Whether engine, pipeline.toml and labels fit together: at `tandem bundle` and at every start.

It needs neither OpenCV nor a session.
"""

from collections.abc import Sequence

import msgspec

from device.engine.manifest import Dim, DimRange, TensorInfo
from device.errors import PipelineError
from pipelines.config import PipelineConfig
from pipelines.stages.decoder_check import check_outputs
from pipelines.stages.decoder_inputs import constant_inputs
from pipelines.stages.scene import check_scene


def check_fit(
    config: PipelineConfig,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    labels: Sequence[str],
    dims: Sequence[DimRange] = (),
) -> None:
    """Raise PipelineError unless an engine with these tensors can run the pipeline.

    `dims`: the sizes that its dynamic dimensions may take; one that is not given takes any.
    """
    _check_input(config, inputs, {dim.name: dim for dim in dims})
    check_scene(config, labels)
    try:
        single = _of_one_image(outputs, inputs[0].shape[0])
        check_outputs(config.decode, config.preprocess, single, labels)
    except PipelineError as error:
        raise PipelineError(f"pipeline {config.name!r}: {error}") from error


def _check_input(
    config: PipelineConfig, inputs: Sequence[TensorInfo], dims: dict[str, DimRange]
) -> None:
    expected, dtype = config.preprocess.input_shape, config.preprocess.dtype
    constant = constant_inputs(config.decode, config.preprocess)
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
                f" build with --dim {name}=MIN:OPT:MAX."
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
