"""`tandem ranges`: every format into every other, exact, and compared."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner, Result
from model_fixtures import small_convnet
from onnx import numpy_helper

from calibration.table import Adjustments, CalibrationTable, read_table, write_table
from calibration.trt_cache import cache_of, decode_cache, write_cache
from device.errors import TandemError
from toolkit.cli.actions.outputs import need_folders
from toolkit.cli.commands.calibrate import calibrate
from toolkit.cli.commands.ranges import ranges
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.qdq.export import FORMS, export_qdq
from toolkit.quantize.quantize import calibrated_tensors, with_operands


def tandem_ranges(*args: object) -> Result:
    done = CliRunner().invoke(ranges, [str(arg) for arg in args])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def result_of(*args: object) -> dict[str, Any]:
    done = tandem_ranges(*args, "--json")
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def scales_in_cache(path: Path) -> dict[str, bytes]:
    """Tensor -> the bits of its scale, by a reader that shares nothing with the project."""
    header, *lines = path.read_text().splitlines()
    assert header.startswith("TRT-")
    pairs = (line.rsplit(": ", 1) for line in lines)
    return {name: bytes.fromhex(digits) for name, digits in pairs}


def scales_in_table(path: Path) -> dict[str, bytes]:
    tensors = json.loads(path.read_text())["tensors"]
    return {name: struct.pack(">f", np.float32(amax / 127)) for name, amax in tensors.items()}


def scales_in_qdq(path: Path) -> dict[str, bytes]:
    """Activation -> the bits of the scale of the Q that reads it."""
    model = onnx.load(path)
    arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    return {
        node.input[0]: struct.pack(">f", float(arrays[node.input[1]]))
        for node in model.graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] not in arrays
    }


def measured(amax: dict[str, float], **more: Any) -> CalibrationTable:
    return CalibrationTable(
        **{"method": "minmax", "samples": 2, "data_sha256": "0" * 64, "model_sha256": "1" * 64}
        | more,
        tensors=amax,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.onnx"
    return small_convnet(path, np.random.default_rng())


def tensors_of(model: Path) -> tuple[str, ...]:
    graph, _ = run_passes(import_model(model).model)
    return tuple(with_operands(graph, dict.fromkeys(calibrated_tensors(graph), 1.0)))


@pytest.mark.parametrize("_", range(3))
def test_scales_go_round_through_every_format_to_the_bit(
    tmp_path: Path, model: Path, rng: np.random.Generator, _: int
) -> None:
    """table -> cache -> table -> Q/DQ -> cache, read back by readers of the test's own."""
    tensors = tensors_of(model)
    scales = rng.integers(0x10000000, 0x70000000, len(tensors), dtype=np.uint32).view(np.float32)
    amax = {name: 127 * float(scale) for name, scale in zip(tensors, scales, strict=True)}
    names = [tmp_path / name for name in ("a.json", "b.cache", "c.json", "d.onnx", "e.cache")]
    first, cache, table, qdq, last = names
    write_table(first, measured(amax))
    result_of(first, "--cache", cache)
    result_of(cache, "--model", model, "--table", table)
    result_of(table, "--model", model, "--qdq", qdq, "--qdq-for", "tensorrt-dla")
    result_of(qdq, "--cache", last)
    expected = scales_in_table(first)
    assert scales_in_cache(cache) == expected
    assert scales_in_table(table) == expected
    assert read_table(table).tensors == amax  # amax = 127 s, so nothing was rounded
    stated = scales_in_qdq(qdq)
    assert stated.keys() >= {"x", "r0", "r1", "g", "f"}
    assert stated == {name: expected[name] for name in stated}
    again = scales_in_cache(last)
    assert {name: again[name] for name in stated} == stated


def test_a_cache_comes_back_with_its_bytes(tmp_path: Path, model: Path) -> None:
    path, again, newer = (tmp_path / name for name in ("a.cache", "b.cache", "c.cache"))
    write_cache(path, cache_of({"(Unnamed Layer* 1) [Shuffle]_output": 3.0, "x:0": 1.5}, "8502"))
    result_of(path, "--cache", again)
    assert again.read_bytes() == path.read_bytes()
    result_of(path, "--cache", newer, "--tensorrt", "10.3.0")
    assert newer.read_text().startswith("TRT-100300-EntropyCalibration2\n")
    assert scales_in_cache(newer) == scales_in_cache(path)


def test_a_table_of_another_file_is_said(tmp_path: Path, model: Path) -> None:
    amax = dict.fromkeys(tensors_of(model), 2.0)
    sha256 = hashlib.sha256(model.read_bytes()).hexdigest()
    same_model, no_model, cache = tmp_path / "own.json", tmp_path / "other.json", tmp_path / "c"
    write_table(same_model, measured(amax, model_sha256=sha256))
    write_table(no_model, measured(amax))
    write_cache(cache, cache_of(amax, "8502"))  # which says nothing of its model
    message = "the calibration table was measured on another model file"
    notes_of = {
        path: " ".join(result_of(path, "--model", model)["notes"])
        for path in (same_model, no_model, cache)
    }
    assert [message in text for text in notes_of.values()] == [False, True, False]
    assert f"this file has {sha256[:12]}" in notes_of[no_model]


def test_a_qdq_model_becomes_cache_plain_model_and_layers(
    tmp_path: Path, model: Path, rng: np.random.Generator
) -> None:
    graph, _ = run_passes(import_model(model).model)
    amax = {name: float(rng.uniform(0.1, 9)) for name in tensors_of(model)}
    (float_node,) = (str(n.name) for n in graph.graph if n.op_type == "Gemm")
    qdq = tmp_path / "q.onnx"
    onnx.save(
        ir.to_proto(export_qdq(graph, amax, "tensorrt-gpu", keep_float=frozenset({float_node}))),
        qdq,
    )
    cache, plain, layers = tmp_path / "c", tmp_path / "plain.onnx", tmp_path / "fp16.txt"
    result = result_of(qdq, "--cache", cache, "--plain", plain, "--layers", layers)
    assert result["kind"] == "Q/DQ model"
    assert result["wrote"] == [str(cache), str(plain), str(layers)]
    # For the GPU an Add leaves the operand that it is computed with in floating point: no range.
    assert layers.read_text() == f"add1:fp16,{float_node}:fp16"
    assert result["keep_float"] == ["add1", float_node]
    assert result["model"]["left_float"] == ["add1"]
    ops = [node.op_type for node in onnx.load(plain).graph.node]
    assert ops == [node.op_type for node in graph.graph]
    onnx.checker.check_model(onnx.load(plain), full_check=True)
    assert scales_in_cache(cache).items() >= scales_in_qdq(qdq).items()
    assert decode_cache(cache.read_text(), str(cache)).algorithm == "EntropyCalibration2"


def test_two_files_are_compared_tensor_by_tensor(tmp_path: Path) -> None:
    one, second = tmp_path / "one.json", tmp_path / "other.cache"
    write_table(one, measured({"same": 1.0, "less": 2.0, "more": 3.0, "mine": 4.0}))
    write_cache(second, cache_of({"same": 1.0, "less": 4.0, "more": 2.0, "yours": 1.0}, "8502"))
    actual = result_of(one, "--against", second)["against"]
    assert actual["equal"] == 1
    assert [row["tensor"] for row in actual["changed"]] == ["less", "more"]
    assert actual["changed"][0]["second"] == pytest.approx(4.0, rel=1e-6)
    assert (actual["only_first"], actual["only_second"]) == (["mine"], ["yours"])
    text = tandem_ranges(one, "--against", second).output
    assert "1 ranges equal, 2 differ, 1 only here, 1 only there" in text
    assert "less: 2 here, 4 there (2 times)" in text


def test_what_the_model_does_not_know_is_counted_and_shown(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "c"
    write_cache(path, cache_of({"x": 1.0, "r0": 2.0, "other:0": 1.0}, "8502"))
    actual = result_of(path, "--model", model)["model"]
    assert actual["unknown"] == ["other:0"]
    assert "x" not in actual["missing"]
    assert actual["missing"]
    text = tandem_ranges(path, "--model", model).output
    assert "1 names in the calibration table are no tensors of the model: 'other:0'" in text


# A depth of 16 is no block of MXFP8.
@pytest.mark.parametrize("form", [form for form in FORMS if form != "tensorrt-mxfp8"])
def test_the_written_qdq_model_is_valid(tmp_path: Path, model: Path, form: str) -> None:
    table, qdq = tmp_path / "t.json", tmp_path / "q.onnx"
    write_table(table, measured(dict.fromkeys(tensors_of(model), 2.0)))
    result_of(table, "--model", model, "--qdq", qdq, "--qdq-for", form)
    onnx.checker.check_model(onnx.load(qdq), full_check=True)


def test_adjusted_ranges_go_only_with_the_adjusted_model(
    tmp_path: Path, model: Path, rng: np.random.Generator
) -> None:
    imported = import_model(model)
    table = measured(
        dict.fromkeys(tensors_of(model), 2.0),
        format=2,
        model_sha256=imported.sha256,
        adjusted=Adjustments(biases={"conv0": tuple(rng.normal(size=16).round(3).tolist())}),
    )
    path, cache, plain = tmp_path / "t.json", tmp_path / "c", tmp_path / "p.onnx"
    write_table(path, table)
    with pytest.raises(TandemError, match="a TensorRT cache holds ranges alone"):
        tandem_ranges(path, "--cache", cache)
    assert not cache.exists()
    result_of(path, "--model", model, "--cache", cache, "--adjusted-model", plain)
    before = {t.name: numpy_helper.to_array(t) for t in onnx.load(model).graph.initializer}
    after = onnx.load(plain)
    (conv,) = (node for node in after.graph.node if node.name == "conv0")
    (bias,) = (t for t in after.graph.initializer if t.name == conv.input[2])
    np.testing.assert_allclose(
        numpy_helper.to_array(bias), before["b0"] + table.adjusted.biases["conv0"], rtol=1e-5
    )


def test_dummy_ranges_do_not_turn_into_formats_that_cannot_say_so(
    tmp_path: Path, model: Path
) -> None:
    path, out = tmp_path / "t.json", tmp_path / "out"
    write_table(path, measured(dict.fromkeys(tensors_of(model), 4.0), samples=0, dummy=True))
    for option in ("--cache", "--qdq"):
        with pytest.raises(TandemError, match="holds dummy ranges, good for timing only"):
            tandem_ranges(path, "--model", model, option, out)
        assert not out.exists()


def test_what_cannot_be_written_says_what_is_missing(tmp_path: Path, model: Path) -> None:
    path, out = tmp_path / "c", tmp_path / "out"
    write_cache(path, cache_of({"x": 1.0}, "8502"))
    for args, message in (
        (("--qdq", out), "none is given; add --model"),
        (("--plain", out), "is a TensorRT cache, which holds no model"),
        (("--cache", out, "--tensorrt", "ten"), "ten"),
        (("--against", tmp_path / "none"), "none: cannot read the INT8 ranges"),
        (("--table", tmp_path / "no" / "t.json"), "cannot write the calibration table"),
    ):
        with pytest.raises(TandemError, match=message):
            tandem_ranges(path, *args)
        assert not out.exists()


def test_a_file_in_a_missing_folder_is_refused_before_the_work(tmp_path: Path) -> None:
    need_folders(None, tmp_path / "here.html")
    with pytest.raises(TandemError, match=r"there is no folder .*no; make it"):
        need_folders(tmp_path / "no" / "x.html")


@pytest.mark.parametrize(
    ("option", "file"),
    [(("--tensorrt", "10.3.0"), "--cache"), (("--qdq-for", "onnxruntime"), "--qdq")],
)
@pytest.mark.parametrize("command", [calibrate, ranges], ids=["calibrate", "ranges"])
def test_an_option_of_a_file_needs_the_file(
    command: click.Command, option: tuple[str, str], file: str
) -> None:
    data = ("--data", "none") if command is calibrate else ()
    done = CliRunner().invoke(command, ["none.onnx", *data, *option])
    assert done.exit_code == 2
    assert f"give {file} too" in done.output
