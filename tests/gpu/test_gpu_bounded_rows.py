"""Rows whose number data decide: padded to their bound where a head multiplies them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import cuda_double
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from detector_graphs import BOXES, KEPT, SIDE, detector, detector_feeds
from model_fixtures import run_model
from onnx import TensorProto, helper

from device.runtime.session import open_session
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.gpu.data_dependent_shapes.rewrite import give_bounds
from toolkit.gpu.support import ask_support
from toolkit.graph.passes import run_passes
from toolkit.partition.planning import portable
from toolkit.quantize.ranges.options import RangeOptions

pytest.importorskip("triton", reason="Triton is not installed")


def bounded(model: onnx.ModelProto) -> tuple[ir.Model, str]:
    """The model after all passes, and what was done to its rows."""
    graph, _ = run_passes(ir.from_proto(model))
    done = give_bounds(graph)
    return graph, done


@pytest.mark.parametrize("good", [0, 1, 3, KEPT, BOXES])
def test_padding_changes_no_result(good: int, rng: np.random.Generator) -> None:
    model = detector(rng)
    graph, done = bounded(model)
    subsets, padded = done.split("; ")
    assert subsets == "computed 2 subsets of rows as all rows"
    assert padded.startswith(f"padded the rows of 'slice' to {KEPT} for ")
    feeds = detector_feeds(rng, good)
    expected = run_model(model, feeds)
    assert len(expected["places"]) == min(good, KEPT)
    for name, values in run_model(ir.to_proto(graph), feeds).items():
        assert np.array_equal(values, expected[name])


def test_kernels_compute_the_head(rng: np.random.Generator) -> None:
    graph, _ = bounded(detector(rng))
    refused = ask_support(graph).refused
    sizes = {node.op_type: list(node.outputs[0].shape or ()) for node in graph.graph}
    assert sizes["Gemm"] == [KEPT, 3]
    multiplying = {n.op_type: n.name in refused for n in graph.graph}
    assert not any(multiplying[op] for op in ("Conv", "Gemm", "RoiAlign", "Softmax"))
    assert "ScatterElements" not in multiplying


def head_of(middle: list[onnx.NodeProto]) -> onnx.ModelProto:
    """Rows that NonZero chooses, at most 5, through `middle` from `r` to `m`, then a product."""
    nodes = [
        helper.make_node("NonZero", ["mask"], ["at"], "nonzero"),
        helper.make_node("Squeeze", ["at", "first_axis"], ["places"], "squeeze"),
        helper.make_node("Slice", ["places", "start", "end", "first_axis"], ["first"], "slice"),
        helper.make_node("Gather", ["x", "first"], ["r"], "gather"),
        *middle,
        helper.make_node("MatMul", ["m", "w"], ["y"], "product"),
    ]
    w = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    weights = {"w": w, "first_axis": np.array([0]), "start": np.array([0]), "end": np.array([5])}
    weights |= {"column": np.array([1]), "turned": np.array([4, -1]), "two": np.array([2])}
    graph = helper.make_graph(
        nodes,
        "head",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, (9, 4)),
            helper.make_tensor_value_info("mask", TensorProto.BOOL, (9,)),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(values, name) for name, values in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def node(op: str, inputs: str, output: str = "m", **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), [output], name=f"{op} {output}", **attributes)


ALONE = {
    "a function": [node("Tanh", "r")],
    "another axis": [node("Softmax", "r", axis=1)],
    "a sum of each row": [node("ReduceSum", "r column", "s"), node("Mul", "r s")],
    "reshaped and back": [
        node("Unsqueeze", "r column", "u"),
        node("Transpose", "u", "t", perm=[1, 0, 2]),
        node("Squeeze", "t first_axis"),
    ],
    "columns": [node("Slice", "r start two column", "s"), node("Concat", "s s", axis=1)],
    "its own number of rows": [
        node("Shape", "r", "n"),
        node("ConstantOfShape", "n", "zeros"),
        node("Add", "r zeros"),
    ],
}
TOGETHER = {
    "softmax over rows": [node("Softmax", "r", axis=0)],
    "a running sum": [node("CumSum", "r start")],
    "a mean of all rows": [node("ReduceMean", "r", "s", axes=[0]), node("Mul", "r s")],
    "rows from behind": [node("Slice", "r two end first_axis")],
    "rows as columns": [
        node("Reshape", "r turned", "t"),
        node("Transpose", "t"),
    ],
    "normalized by their number": [
        node("Shape", "r", "n"),
        node("Cast", "n", "f", to=TensorProto.FLOAT),
        node("ReduceProd", "f", "c", keepdims=0),
        node("Div", "r c"),
    ],
}


@pytest.mark.parametrize("name", [*ALONE, *TOGETHER])
def test_rows_are_padded_where_each_is_computed_alone(name: str, rng: np.random.Generator) -> None:
    model = head_of({**ALONE, **TOGETHER}[name])
    graph, done = bounded(model)
    if name in ALONE:
        assert "padded the rows of 'slice' to 5" in done
    for good in (0, 2, 9):
        mask = np.zeros(9, bool)
        mask[rng.choice(9, good, replace=False)] = True
        feeds = {"x": rng.normal(size=(9, 4)).astype(np.float32), "mask": mask}
        try:
            expected = run_model(model, feeds)["y"]
        except ort.capi.onnxruntime_pybind11_state.RuntimeException:
            continue  # no row to take a softmax or a mean of
        assert np.allclose(
            run_model(ir.to_proto(graph), feeds)["y"], expected, rtol=1e-6, equal_nan=True
        )


@pytest.fixture
def gpu() -> Iterator[cuda_double.CudaDouble]:
    with cuda_double.installed() as double:
        yield double
    sys.modules.pop("tensorrt", None)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_engine_keeps_what_its_kernels_pass_to_each_other_on_the_gpu(
    precision: str,
    gpu: cuda_double.CudaDouble,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    monkeypatch.setattr(portable, "_pays", lambda *_: True)  # the network is small
    model = detector(rng, threshold=-1.0)  # all: FP16 moves some across a threshold
    onnx.save(model, tmp_path / "m.onnx")
    with cuda_double.interpreted_cubins():
        options = BuildOptions(precision=precision)
        result = build_engine(tmp_path / "m.onnx", "orin-nano-8gb", tmp_path / "m.engine", options)
    with open_session(result.path) as session:
        assert {r.implementation for r in session.reports} == {"cuda", "portable"}
        on_gpu = {r.segment for r in session.reports if r.implementation == "cuda"}
        readers = {
            tensor: [s.name for s in result.manifest.segments if tensor in s.inputs]
            for segment in result.manifest.segments
            if segment.name in on_gpu
            for tensor in segment.outputs
        }
        remaining = {tensor for tensor, names in readers.items() if names and on_gpu >= {*names}}
        assert {"f0", "f1"} <= remaining
        assert any("DtoD" in call for call in gpu.calls)
        for good in (0, 2, BOXES):
            feeds = detector_feeds(rng, good)
            expected, actual = run_model(model, feeds), session.infer(feeds)
            limit = 1e-5 if precision == "fp32" else 4e-3
            assert np.allclose(actual["places"], expected["places"], rtol=limit)
            assert actual["classes"].shape == expected["classes"].shape
            assert np.abs(actual["classes"] - expected["classes"]).max(initial=0) < limit
            one_by_one = session.segment_times_ms(feeds)
            assert [*one_by_one] == [segment.name for segment in result.manifest.segments]


def test_int8_of_a_level_that_no_sample_has(
    gpu: cuda_double.CudaDouble,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    monkeypatch.setattr(portable, "_pays", lambda *_: True)  # the network is small
    model = detector(rng)
    onnx.save(model, tmp_path / "m.onnx")
    data = [detector_feeds(rng, BOXES, side=SIDE / 4) for _ in range(4)]  # small boxes alone
    options = BuildOptions(
        precision="int8",
        data=data,
        ranges=RangeOptions("minmax", keep="none"),
        accept_loss=True,
    )
    with cuda_double.interpreted_cubins():
        result = build_engine(tmp_path / "m.onnx", "orin-nano-8gb", tmp_path / "m.engine", options)
    assert result.calibration is not None
    assert any("were empty in every sample" in remark for remark in result.calibration.remarks)
    assert "large_s" not in result.calibration.table.tensors
    assert {"small_s", "h", "f0"} <= {*result.calibration.table.tensors}
    assert any("padded the rows of 'slice'" in note for note in result.notes)
    on_gpu = [row.op for row in result.manifest.plan if row.processor == "gpu"]
    assert on_gpu.count("Gemm") == 2
    with open_session(result.path) as session:
        feeds = detector_feeds(rng, BOXES)  # large ones, too
        expected, actual = run_model(model, feeds), session.infer(feeds)
    assert np.allclose(actual["places"], expected["places"], rtol=4e-3)
    assert actual["classes"].max() == pytest.approx(expected["classes"].max(), abs=0.15)
