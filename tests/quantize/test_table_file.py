"""Ranges from any file: told by its content, fitted to the graph, never quietly incomplete."""

import hashlib
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from model_fixtures import save, small_convnet
from onnx import helper

from calibration.table import IMPORTED, CalibrationTable, encode_table
from calibration.trt_cache import cache_of, encode_cache
from device.errors import TandemError
from device.runtime.session import open_session
from toolkit.engine.build import BuildOptions, BuildResult, build_engine
from toolkit.errors import BuildError
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.qdq.export import export_qdq
from toolkit.quantize.quantize import calibrated_tensors, with_operands
from toolkit.quantize.ranges.table_file import (
    CACHE,
    QDQ,
    TABLE,
    fit_table,
    imported_table,
    read_ranges,
)


def batch_norm_net(path: Path, rng: np.random.Generator) -> Path:
    """What exporters leave: batch normalisation, Identity, Dropout, computed constants."""
    c = 8

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    weights = {"w1": normal(c, 3, 3, 3), "w2": normal(c, c, 3, 3), "w3": normal(4, c)}
    for i in "12":
        weights |= {f"g{i}": normal(c), f"b{i}": normal(c), f"m{i}": normal(c)}
        weights[f"v{i}"] = rng.uniform(0.5, 2, c).astype(np.float32)
    weights |= {"half": np.float32([0.5]), "two": np.float32([2.0])}
    pads = {"pads": [1] * 4}
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], "conv1", **pads),
        helper.make_node("BatchNormalization", ["c1", "g1", "b1", "m1", "v1"], ["n1"], "bn1"),
        helper.make_node("Relu", ["n1"], ["r1"], "relu1"),
        helper.make_node("Identity", ["r1"], ["i1"], "identity"),
        helper.make_node("Conv", ["i1", "w2"], ["c2"], "conv2", **pads),
        helper.make_node("BatchNormalization", ["c2", "g2", "b2", "m2", "v2"], ["n2"], "bn2"),
        helper.make_node("Dropout", ["n2"], ["d2"], "dropout"),
        helper.make_node("Mul", ["half", "two"], ["one"], "one"),
        helper.make_node("Mul", ["d2", "one"], ["s2"], "scale"),
        helper.make_node("Add", ["s2", "r1"], ["a"], "add"),
        helper.make_node("GlobalAveragePool", ["a"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "w3"], ["y"], "fc", transB=1),
    ]
    return save(path, nodes, {"x": [1, 3, 12, 12]}, {"y": [1, 4]}, weights)


def every_range(path: Path, feeds: dict[str, np.ndarray]) -> dict[str, float]:
    """A range of each activation of the file itself, as a calibrator of TensorRT has them."""
    model = import_model(path).model
    for node in model.graph:
        for out in node.outputs:
            out.type = out.type or ir.TensorType(ir.DataType.FLOAT)
    tensors = [str(o.name) for n in model.graph for o in n.outputs if o.name != "one"]
    seen = ActivationRunner(model, tensors)(feeds)
    results = {name: float(np.abs(array).max()) for name, array in {**feeds, **seen}.items()}
    return {name: 127 * float(np.float32(amax / 127)) for name, amax in results.items()}


def measured(amax: dict[str, float], sha256: str = "0" * 64) -> CalibrationTable:
    return CalibrationTable(
        method="minmax", samples=3, data_sha256="0" * 64, model_sha256=sha256, tensors=amax
    )


def output(result: BuildResult, feeds: dict[str, np.ndarray]) -> np.ndarray:
    with open_session(result.path) as session:
        return session.infer(feeds)["y"]


def written(path: Path, kind: str, model: Path, amax: dict[str, float]) -> Path:
    """Ranges in a file of some kind, under a name that says nothing."""
    if kind == CACHE:
        path.write_text(encode_cache(cache_of(amax, "8502")))
    elif kind == TABLE:
        path.write_bytes(encode_table(measured(amax)))
    else:
        graph, _ = run_passes(import_model(model).model)
        onnx.save(ir.to_proto(export_qdq(graph, amax, "tensorrt-dla")), path)
    return path


@pytest.mark.parametrize("kind", [TABLE, CACHE, QDQ])
def test_the_content_says_what_a_file_is(
    tmp_path: Path, rng: np.random.Generator, kind: str
) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    graph, _ = run_passes(import_model(model).model)
    amax = {t: 127 * float(np.float32(rng.uniform(0.01, 9))) for t in calibrated_tensors(graph)}
    path = written(tmp_path / "ranges.png", kind, model, with_operands(graph, amax))
    result = read_ranges(path)
    assert result.kind == kind
    assert (result.table.method == IMPORTED) == (kind != TABLE)
    assert result.table.data_sha256 == (
        "0" * 64 if kind == TABLE else hashlib.sha256(path.read_bytes()).hexdigest()
    )
    for name in amax.keys() - {"y"}:
        assert result.table.tensors[name] == amax[name]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "begins with 'nothing'"),
        (b"x 1.0\n", r"begins with 'x 1.0\\n'"),
        (b"\x89PNG\r\n", "TensorRT cache .* or a Q/DQ model"),
        (b"{}", "not a calibration table"),
        (b"TRT-1\nx: 3c010204\n", "line 1: found 'TRT-1'"),
        (b"TRT-8502-EntropyCalibration2\n\xff: 3c010204\n", "byte 29 is not UTF-8"),
        (b"TRT-8502-EntropyCalibration2\nx: 00000001\n", "amax of tensor 'x'"),
        (b"\x08\x09nonsense", "not a complete ONNX file"),
    ],
)
def test_what_holds_no_ranges_is_refused_with_the_file(
    tmp_path: Path, data: bytes, message: str
) -> None:
    path = tmp_path / "ranges"
    path.write_bytes(data)
    with pytest.raises(TandemError, match=message) as caught:
        read_ranges(path)
    assert str(path) in str(caught.value)


def test_a_plain_model_and_a_missing_file_are_refused(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    with pytest.raises(TandemError, match=r"m\.onnx: an ONNX model without QuantizeLinear"):
        read_ranges(path)
    with pytest.raises(TandemError, match=r"none: cannot read the INT8 ranges \(No such file"):
        read_ranges(tmp_path / "none")


def test_ranges_by_the_names_of_the_file_survive_the_passes(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Batch normalisation is fused, Identity and Dropout are dropped; no range is lost by it."""
    path = batch_norm_net(tmp_path / "m.onnx", rng)
    feeds = {"x": rng.normal(size=(1, 3, 12, 12)).astype(np.float32)}
    amax = every_range(path, feeds)
    original = import_model(path).model
    graph, _ = run_passes(original)
    assert not {"BatchNormalization", "Identity", "Dropout"} & {n.op_type for n in graph.graph}
    fitted = fit_table(imported_table(amax, "0" * 64), original, graph)
    assert (fitted.ranges, fitted.unknown, fitted.inferred) == (fitted.tensors, (), ())
    assert {"c1", "c2"} <= set(fitted.fused)
    assert (fitted.missing, fitted.float_nodes) == ((), ())
    # The fused node makes what batch normalisation made, so it has that range.
    assert fitted.table.tensors["n1"] == amax["n1"]
    cache = read_ranges(written(tmp_path / "c", CACHE, path, amax)).table
    options = (BuildOptions(table=cache), BuildOptions(table=measured(fitted.table.tensors)))
    results = [
        output(build_engine(path, "laptop", tmp_path / f"{i}.engine", one), feeds)
        for i, one in enumerate(options)
    ]
    np.testing.assert_array_equal(*results)


def test_ranges_are_carried_over_from_neighbours_and_counted(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = batch_norm_net(tmp_path / "m.onnx", rng)
    amax = every_range(path, {"x": rng.normal(size=(1, 3, 12, 12)).astype(np.float32)})
    for name in ("r1", "p", "f"):  # named i1 behind the Identity; of "a" behind pool and flatten
        del amax[name]
    table = imported_table({**amax, "stray:0": 1.0}, "0" * 64)
    result = build_engine(path, "laptop", tmp_path / "m.engine", BuildOptions(table=table))
    notes = "\n".join(result.notes)
    assert "1 names in the calibration table are no tensors of the model: 'stray:0'" in notes
    assert "3 tensors lack a range and take that of a neighbour: 'r1', 'p', 'f'" in notes
    original = import_model(path).model
    fitted = fit_table(table, original, run_passes(original)[0])
    assert fitted.table.tensors["r1"] == amax["i1"]
    assert fitted.table.tensors["f"] == amax["a"]


def test_nodes_without_ranges_compute_in_floating_point_and_are_named(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = batch_norm_net(tmp_path / "m.onnx", rng)
    feeds = {"x": rng.normal(size=(1, 3, 12, 12)).astype(np.float32)}
    amax = every_range(path, feeds)
    partial = {name: amax[name] for name in ("a", "p", "f", "y")}
    result = build_engine(
        path, "laptop", tmp_path / "m.engine", BuildOptions(table=imported_table(partial, "0" * 64))
    )
    assert any(note.startswith("3 tensors lack a range: 'x', ") for note in result.notes)
    assert any("3 nodes compute in floating point" in note for note in result.notes)
    assert np.isfinite(output(result, feeds)).all()
    with pytest.raises(BuildError, match=r"Tensor 'x', read by node .* has no range"):
        build_engine(  # a table of our own is complete, or is not that of this model
            path, "laptop", tmp_path / "m.engine", BuildOptions(table=measured(partial))
        )


def test_a_table_of_another_model_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    path = batch_norm_net(tmp_path / "m.onnx", rng)
    for table in (imported_table({"a1": 1.0}, "0" * 64), measured({"a1": 1.0})):
        with pytest.raises(BuildError, match="names none of the model's 8 tensors, such as 'x'"):
            build_engine(path, "laptop", tmp_path / "m.engine", BuildOptions(table=table))


def test_float_nodes_are_known_by_the_name_that_the_file_gives_them(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = batch_norm_net(tmp_path / "m.onnx", rng)
    amax = every_range(path, {"x": rng.normal(size=(1, 3, 12, 12)).astype(np.float32)})
    original = import_model(path).model
    graph, _ = run_passes(original)
    fitted = fit_table(
        imported_table(amax, "0" * 64, keep_float=("conv2", "gone")), original, graph
    ).table.keep_float
    (name,) = fitted  # fused with its batch normalisation, under another name
    (node,) = (node for node in graph.graph if node.name == name)
    assert node.op_type == "Conv"
    assert node.outputs[0].name == "n2"


@pytest.mark.parametrize("target", ["tensorrt-gpu", "tensorrt-dla"])
def test_a_qdq_model_is_built_as_its_plain_model_with_its_ranges(
    tmp_path: Path, rng: np.random.Generator, target: str
) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    feeds = {"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)}
    graph, _ = run_passes(import_model(path).model)
    seen = ActivationRunner(graph, calibrated_tensors(graph))(feeds)
    amax = {name: 127 * float(np.float32(np.abs(a).max() / 127)) for name, a in seen.items()}
    amax["f"] = amax["g"]  # what is only moved keeps its range
    qdq = tmp_path / "q.onnx"
    onnx.save(ir.to_proto(export_qdq(graph, amax, target)), qdq)
    result = build_engine(qdq, "laptop", tmp_path / "q.engine", BuildOptions(precision="int8"))
    assert result.manifest.provenance.calibration is not None
    assert result.manifest.provenance.calibration.method == IMPORTED
    table = measured(with_operands(graph, amax))
    plain = build_engine(path, "laptop", tmp_path / "p.engine", BuildOptions(table=table))
    expected = output(plain, feeds)
    if target == "tensorrt-dla":
        np.testing.assert_array_equal(output(result, feeds), expected)
    else:  # one operand of its Add has no range there
        assert any("follow from those of neighbours" in note for note in result.notes)
        assert np.linalg.norm(output(result, feeds) - expected) < 0.1 * np.linalg.norm(expected)
    fp32 = build_engine(qdq, "laptop", tmp_path / "f.engine", BuildOptions(precision="fp32"))
    assert fp32.manifest.provenance.calibration is None  # its Q/DQ stay as they are
    data = BuildOptions(data=[feeds])
    again = build_engine(qdq, "laptop", tmp_path / "d.engine", data)
    assert again.calibration is not None  # measured anew
