"""The outputs that each decoder takes, as data, and the one check of an engine against them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from device.choices import list_choices
from device.engine.manifest import TensorInfo
from device.errors import PipelineError
from pipelines.config import Classification, DecodeConfig, LtrbGrid, PreprocessConfig

CLASSES = "classes"  # the axis whose size is the number of labels
FLOATS = ("float32", "float16")


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """One output that a decoder reads.

    `key`: the key of [decode] that names it. `axes`: sizes, or names of sizes that are the same
    wherever they occur. `more_ones`: further axes of size 1 may follow.
    """

    key: str
    axes: tuple[int | str, ...]
    more_ones: bool = False

    def text(self, sizes: Mapping[str, int]) -> str:
        """Return "scores [1, classes, 8400]", with the sizes that are known."""
        return f"{self.key} [{', '.join(str(sizes.get(str(axis), axis)) for axis in self.axes)}]"


@dataclass(frozen=True, slots=True)
class DecoderOutputs:
    """The outputs of one kind of decoder; `sizes` gives the named sizes that its table settles."""

    outputs: tuple[DecoderOutput, ...]
    sizes: Callable[[Any, PreprocessConfig], Mapping[str, int]] | None = None


def cell_count(config: LtrbGrid, input_width: int, input_height: int) -> int:
    """Return A, the number of cells of all levels together."""
    return sum(-(-input_width // side) * -(-input_height // side) for side in config.strides)


def _grid_sizes(config: LtrbGrid, preprocess: PreprocessConfig) -> Mapping[str, int]:
    return {"cells": cell_count(config, preprocess.width, preprocess.height)}


OUTPUTS: Mapping[type[DecodeConfig], DecoderOutputs] = {
    LtrbGrid: DecoderOutputs(
        (DecoderOutput("boxes", (1, 4, "cells")), DecoderOutput("scores", (1, CLASSES, "cells"))),
        _grid_sizes,
    ),
    Classification: DecoderOutputs((DecoderOutput("scores", (1, CLASSES), more_ones=True),)),
}


def check_outputs(
    config: DecodeConfig,
    preprocess: PreprocessConfig,
    outputs: Sequence[TensorInfo],
    labels: Sequence[str],
) -> None:
    """Raise PipelineError unless the decoder can read these outputs, with these labels.

    A size that is dynamic in the engine fits any.
    """
    decoder = OUTPUTS[type(config)]
    sizes = dict(decoder.sizes(config, preprocess)) if decoder.sizes else {}
    infos = {info.name: info for info in outputs}
    for expected in decoder.outputs:
        name: str = getattr(config, expected.key)
        if name not in infos:
            raise PipelineError(
                f"[decode] has {expected.key} = {name!r}, which is no output of the engine: use one"
                f" of {list_choices(name, infos)}. {_summary(outputs)}"
            )
        if not _fits(expected, infos[name], sizes):
            raise PipelineError(
                f"the decoder {_kind(type(config))!r} takes {expected.text(sizes)} (rank"
                f" {len(expected.axes)}, {' or '.join(FLOATS)}), and the engine gives"
                f" {_tensor_text(infos[name])} (rank {len(infos[name].shape)}): correct [decode] of"
                f" pipeline.toml, or use a model for this decoder. {_summary(outputs)}"
            )
        for axis, size in zip(expected.axes, infos[name].shape, strict=False):
            if isinstance(axis, str) and isinstance(size, int):
                sizes[axis] = size
    classes = sizes.get(CLASSES, len(labels))
    if classes != len(labels):
        raise PipelineError(
            f"the engine knows {classes} classes but labels.txt names {len(labels)}: use the labels"
            " that the model was trained with."
        )


def _fits(expected: DecoderOutput, info: TensorInfo, sizes: Mapping[str, int]) -> bool:
    rank = len(expected.axes)
    axes = [sizes.get(axis) if isinstance(axis, str) else axis for axis in expected.axes]
    if expected.more_ones:
        axes += [1] * (len(info.shape) - rank)
    return (
        info.dtype in FLOATS
        and len(info.shape) == len(axes)
        and all(
            size == axis
            for axis, size in zip(axes, info.shape, strict=True)
            if isinstance(size, int) and axis is not None
        )
    )


def _kind(config: type[DecodeConfig]) -> str:
    return str(config.__struct_config__.tag)


def _tensor_text(info: TensorInfo) -> str:
    sizes = ", ".join("?" if size is None else str(size) for size in info.shape)
    return f"{info.name!r} {info.dtype} [{sizes}]"


def _summary(outputs: Sequence[TensorInfo]) -> str:
    """Return what the engine gives and what each decoder takes."""
    decoders = "; ".join(
        f"{_kind(config)} takes {' and '.join(output.text({}) for output in decoder.outputs)}"
        for config, decoder in sorted(OUTPUTS.items(), key=lambda row: _kind(row[0]))
    )
    return f"The engine's outputs: {', '.join(map(_tensor_text, outputs))}. Decoders: {decoders}."
