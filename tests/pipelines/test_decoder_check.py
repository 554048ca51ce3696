"""The check of an engine's outputs, for every row of the table of decoders."""

import dataclasses

import pytest
from msgspec.structs import replace

from device.engine.manifest import TensorInfo
from device.errors import PipelineError
from pipelines.config import PreprocessConfig
from pipelines.decode_config import Finished, UltralyticsDetect
from pipelines.stages.decode import constant_inputs
from pipelines.stages.decoder_check import check_outputs, class_count, fitting_decoders
from pipelines.stages.decoders.expected import CLASSES, Size
from pipelines.stages.decoders.table import ROWS

INPUT = PreprocessConfig(width=128, height=64)
SIZES = {CLASSES: 3, "coefficients": 32, "map height": 16, "map width": 32}
ANY = 9  # of a size that the table does not settle


def size_of(axis):
    if isinstance(axis, int):
        return axis
    if isinstance(axis, str):
        return SIZES.get(axis, ANY)
    return axis.plus + axis.times * sum(SIZES.get(name, ANY) for name in axis.names)


def outputs_of(row):
    """Outputs of an engine as a decoder expects them, for three classes."""
    expected = [
        dataclasses.replace(one, name=one.name or "unnamed")
        for one in row.outputs(row.example, INPUT)
    ]
    return [
        TensorInfo(name=one.name, dtype=one.dtypes[0], shape=tuple(map(size_of, one.axes)))
        for one in expected
    ]


def labels_of(row):
    """Three labels, or one where the outputs do not show the classes."""
    shown = any(
        CLASSES in (axis.names if isinstance(axis, Size) else (axis,))
        for one in row.outputs(row.example, INPUT)
        for axis in one.axes
    )
    return ("a", "b", "c") if shown else ("a",)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.kind)
def test_outputs_that_fit_pass_and_are_recognised(row):
    outputs, labels = outputs_of(row), labels_of(row)
    check_outputs(row.example, INPUT, outputs, labels)
    assert class_count(row.example, INPUT, outputs) in (3, None)
    assert row.kind in fitting_decoders(outputs[::-1], INPUT, labels)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.kind)
def test_another_rank_type_name_or_fixed_size_is_refused(row):
    outputs, labels = outputs_of(row), labels_of(row)
    for number, output in enumerate(outputs):
        wrong = [
            TensorInfo(name=output.name, dtype=output.dtype, shape=(*output.shape, 2)),
            TensorInfo(name=output.name, dtype="complex64", shape=output.shape),
            TensorInfo(name="nothing", dtype=output.dtype, shape=output.shape),
        ]
        fixed = row.outputs(row.example, INPUT)[number].axes
        for place, axis in enumerate(fixed):
            if isinstance(axis, int):
                shape = list(output.shape)
                shape[place] += 1
                wrong.append(TensorInfo(name=output.name, dtype=output.dtype, shape=tuple(shape)))
        for one in wrong:
            with pytest.raises(
                PipelineError, match=r"The engine's outputs: .*`tandem model guess`"
            ):
                check_outputs(
                    row.example, INPUT, [*outputs[:number], one, *outputs[number + 1 :]], labels
                )


@pytest.mark.parametrize("row", [row for row in ROWS if len(labels_of(row)) == 3],
                         ids=lambda row: row.kind)  # fmt: skip
def test_other_labels_are_refused(row):
    with pytest.raises(PipelineError, match=r"knows 3 classes but labels\.txt names 2"):
        check_outputs(row.example, INPUT, outputs_of(row), ("a", "b"))


def test_the_message_names_the_decoders_that_fit():
    outputs = [TensorInfo(name="output0", dtype="float32", shape=(1, 7, 168))]
    config = next(row.example for row in ROWS if row.kind == "yolox")
    with pytest.raises(PipelineError) as error:
        check_outputs(replace(config, output="output0"), INPUT, outputs, ("a", "b", "c"))
    assert "'yolox' takes output [1, 168, 5+classes]" in str(error.value)
    assert "'output0' float32 [1, 7, 168]" in str(error.value)
    assert "Decoders for such shapes: ultralytics_detect" in str(error.value)


def test_the_message_names_the_decoders_that_fit_with_other_labels():
    outputs = [TensorInfo(name="output0", dtype="float32", shape=(1, 22, 168))]
    config = next(row.example for row in ROWS if row.kind == "yolox")
    with pytest.raises(PipelineError) as error:
        check_outputs(replace(config, output="output0"), INPUT, outputs, ("a", "b", "c"))
    says = "Decoders for such shapes, with other labels than these 3: ultralytics_detect, "
    assert says in str(error.value)


def test_the_message_lists_the_decoders_where_none_fits():
    outputs = [TensorInfo(name="output0", dtype="float32", shape=(1,))]
    config = next(row.example for row in ROWS if row.kind == "yolox")
    with pytest.raises(PipelineError, match=r"No decoder takes such shapes \(kinds: blazeface, "):
        check_outputs(replace(config, output="output0"), INPUT, outputs, ("a",))


def test_dynamic_sizes_fit_any():
    outputs = [TensorInfo(name="output0", dtype="float32", shape=("batch", None, "anchors"))]
    check_outputs(UltralyticsDetect(), INPUT, outputs, ("a",))


def test_a_map_of_another_ratio_is_refused():
    row = next(row for row in ROWS if row.kind == "depth")
    outputs = [TensorInfo(name="predicted_depth", dtype="float32", shape=(1, 32, 32))]
    with pytest.raises(PipelineError, match="'depth' takes output"):
        check_outputs(row.example, INPUT, outputs, ("a",))


def test_the_second_input_of_a_model_takes_the_size_of_its_first():
    config = Finished(size_input="orig_target_sizes")
    (array,) = constant_inputs(config, INPUT).values()
    assert (array.tolist(), array.dtype) == ([[128, 64]], "int64")
    assert constant_inputs(UltralyticsDetect(), INPUT) == {}
