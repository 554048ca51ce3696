"""The check of an engine's outputs against [decode], before the first frame."""

from collections.abc import Sequence

from device.choices import list_choices
from device.engine.manifest import TensorInfo
from device.errors import PipelineError
from pipelines.config import PreprocessConfig
from pipelines.decode_config import DecodeConfig
from pipelines.stages.decoders.expected import (
    CLASSES,
    MAP_HEIGHT,
    MAP_WIDTH,
    Expected,
    tensor_text,
)
from pipelines.stages.decoders.table import DECODERS, ROWS, Decoder


def check_outputs(
    config: DecodeConfig,
    preprocess: PreprocessConfig,
    outputs: Sequence[TensorInfo],
    labels: Sequence[str],
) -> None:
    """Raise PipelineError unless the decoder can read these outputs, with these labels.

    A size that is dynamic in the engine fits any.
    """
    classes = class_count(config, preprocess, outputs, labels)
    if classes is not None and classes != len(labels):
        raise PipelineError(
            f"the engine knows {classes} classes but labels.txt names {len(labels)}: use the labels"
            " that the model was trained with."
        )


def class_count(
    config: DecodeConfig,
    preprocess: PreprocessConfig,
    outputs: Sequence[TensorInfo],
    labels: Sequence[str] = (),
) -> int | None:
    """Return the number of classes that the outputs have, None if they do not show it.

    Raises PipelineError: the decoder cannot read these outputs; `labels` choose the decoders that
    the message names.
    """
    decoder = DECODERS[type(config)]
    expected_outputs = decoder.outputs(config, preprocess)
    sizes: dict[str, int] = {}
    infos = {info.name: info for info in outputs}
    for expected in expected_outputs:
        info = infos.get(expected.name)
        if info is None:
            raise PipelineError(
                f"[decode] has {expected.key} = {expected.name!r}, which is no output of the"
                f" engine: use one of {list_choices(expected.name, infos)}."
                f" {_summary(outputs, preprocess, labels)}"
            )
        known_sizes = dict(sizes)
        if not (expected.fits(info, known_sizes) and _in_ratio(known_sizes, preprocess)):
            raise PipelineError(
                f"the decoder {decoder.kind!r} takes {expected.text(sizes)}"
                f" (rank {len(expected.axes)}, {' or '.join(expected.dtypes)}), and the engine"
                f" gives {tensor_text(info)} (rank {len(info.shape)}): correct [decode] of"
                f" pipeline.toml, or use a model for this decoder."
                f" {_summary(outputs, preprocess, labels)}"
            )
        sizes = known_sizes
    return sizes.get(CLASSES)


def fitting_decoders(
    outputs: Sequence[TensorInfo], preprocess: PreprocessConfig, labels: Sequence[str]
) -> tuple[str, ...]:
    """Return the kinds of decoders for which these outputs have the shapes, in any order.

    `labels` empty: any number of classes.
    """
    return tuple(row.kind for row in ROWS if _fits(row, outputs, preprocess, labels))


def _fits(
    row: Decoder,
    outputs: Sequence[TensorInfo],
    preprocess: PreprocessConfig,
    labels: Sequence[str],
) -> bool:
    sizes = {CLASSES: len(labels)} if labels else {}
    expected = row.outputs(row.example, preprocess)
    return len(expected) <= len(outputs) and _assign(expected, list(outputs), sizes, preprocess)


def _assign(
    expected: Sequence[Expected],
    outputs: list[TensorInfo],
    sizes: dict[str, int],
    preprocess: PreprocessConfig,
) -> bool:
    """True if each expected output can have one of the outputs of its own."""
    if not expected:
        return True
    for index, info in enumerate(outputs):
        known_sizes = dict(sizes)
        if (
            expected[0].fits(info, known_sizes)
            and _in_ratio(known_sizes, preprocess)
            and _assign(
                expected[1:], outputs[:index] + outputs[index + 1 :], known_sizes, preprocess
            )
        ):
            return True
    return False


def _in_ratio(sizes: dict[str, int], preprocess: PreprocessConfig) -> bool:
    """True if a map has the sides of the input in ratio, within one cell."""
    height, width = sizes.get(MAP_HEIGHT), sizes.get(MAP_WIDTH)
    if height is None or width is None:
        return True
    return abs(height * preprocess.width - width * preprocess.height) <= max(
        preprocess.width, preprocess.height
    )


def _summary(
    outputs: Sequence[TensorInfo], preprocess: PreprocessConfig, labels: Sequence[str]
) -> str:
    """Return what the engine gives and which decoders take it."""
    names = ", ".join(map(tensor_text, outputs))
    advice = "`tandem model guess` proposes [preprocess] and [decode]."
    number = f", with other labels than these {len(labels)}" if labels else ""
    for which, known in (("", labels), (number, ())):
        if fitting := fitting_decoders(outputs, preprocess, known):
            kinds = ", ".join(fitting)
            return (
                f"The engine's outputs: {names}. Decoders for such shapes{which}: {kinds}. {advice}"
            )
    kinds = ", ".join(sorted(row.kind for row in ROWS))
    return f"The engine's outputs: {names}. No decoder takes such shapes (kinds: {kinds}). {advice}"
