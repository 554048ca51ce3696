"""Segments lowered once for all sizes of their dynamic dimensions, interpreted at several."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import gpu_interpreter
import numpy as np
import onnx
import pytest
from gpu_dynamic_graphs import (
    IMAGE_CASES,
    SEQUENCES,
    attention,
    detector,
    half_and_back,
    image_case,
    integer_network,
    residual_network,
)
from gpu_graphs import ORIN, Case, node

from device.engine.cuda_manifest import Cuda, Int32
from device.engine.file import open_engine
from device.engine.manifest import DimRange
from device.errors import SessionError
from device.runtime.executors import cuda
from device.runtime.session import open_session
from scripts.gpu_engine import build_on_gpu, relative_error
from toolkit.gpu.codegen.compile_kernels import compile_kernels
from toolkit.gpu.codegen.worker import kernel_function
from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.lower import KernelProgram, lower_segment
from toolkit.gpu.operations import OPERATIONS, OperatorRow
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.shapes.inference import in_steps, traces_of, with_steps
from toolkit.gpu.target import GpuTarget

pytest.importorskip("triton", reason="Triton is not installed")

Rng = np.random.Generator
LIMITS = {"fp32": 1e-5, "fp16": 1e-2}
BATCH = DimRange(name="batch", min=1, opt=2, max=4)
HEIGHT = DimRange(name="height", min=5, opt=8, max=13)
WIDTH = DimRange(name="width", min=6, opt=9, max=12)
TOKENS = DimRange(name="tokens", min=1, opt=9, max=20)
IMAGE_DIMS = (BATCH, HEIGHT, WIDTH)
ROWS = (BATCH, TOKENS)


def lower(
    case: Case, dims: Sequence[DimRange], precision: str = "fp32"
) -> tuple[KernelProgram, tuple[DimRange, ...]]:
    piece = case.segment()
    stepped = with_steps([piece.model], dims)
    program = lower_segment(piece.model, gpu=ORIN, precision=precision, traces=traces_of(stepped))
    return program, stepped


def points(dims: Sequence[DimRange], rng: Rng) -> list[tuple[int, ...]]:
    """The least sizes, the largest, and one set between."""
    between = tuple(
        int(rng.integers(dim.min // dim.step, dim.max // dim.step + 1)) * dim.step for dim in dims
    )
    return [tuple(dim.min for dim in dims), tuple(dim.max for dim in dims), between]


def feeds_at(case: Case, dims: Sequence[DimRange], point: Sequence[int], rng: Rng) -> dict:
    sizes = {dim.name: size for dim, size in zip(dims, point, strict=True)}
    return {
        name: rng.normal(size=[sizes.get(dim, dim) for dim in shape]).astype(np.float32)
        for name, shape in case.inputs.items()
    }


def check(case: Case, dims: Sequence[DimRange], rng: Rng, precision: str = "fp32") -> None:
    program, stepped = lower(case, dims, precision)
    for point in points(stepped, rng):
        feeds = feeds_at(case, stepped, point, rng)
        outputs = gpu_interpreter.run(program, feeds, point)
        for name, truth in case.truth(feeds).items():
            assert outputs[name].shape == truth.shape, point
            difference = np.linalg.norm(outputs[name].astype(np.float64) - truth)
            assert difference <= LIMITS[precision] * np.linalg.norm(truth) + 1e-30, point


@pytest.mark.parametrize("name", IMAGE_CASES)
def test_images_of_any_size_in_the_range(name: str, rng: Rng) -> None:
    check(IMAGE_CASES[name](rng), IMAGE_DIMS, rng)


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_of_any_length_in_the_range(name: str, rng: Rng) -> None:
    check(SEQUENCES[name](rng), ROWS, rng)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "fp16"])
def test_a_residual_network_takes_images_of_any_size(precision: str, rng: Rng) -> None:
    check(residual_network(rng), IMAGE_DIMS, rng, precision)


def test_a_detector_takes_the_sizes_at_which_its_scales_fit(rng: Rng) -> None:
    height = DimRange(name="height", min=8, opt=12, max=20)
    width = DimRange(name="width", min=8, opt=16, max=24)
    case = detector(rng)
    _, dims = lower(case, (BATCH, height, width))
    assert [dim.step for dim in dims] == [1, 4, 4]
    check(case, (BATCH, height, width), rng, "fp16")


def test_a_detector_whose_range_holds_sizes_that_do_not_fit_is_refused(rng: Rng) -> None:
    odd = DimRange(name="height", min=8, opt=12, max=21)
    with pytest.raises(NotCoveredError, match="'both' has the shape"):
        lower(detector(rng), (BATCH, odd, WIDTH))


def test_a_dimension_of_one_size_is_a_number(rng: Rng) -> None:
    fixed = [DimRange(name=dim.name, min=dim.opt, opt=dim.opt, max=dim.opt) for dim in IMAGE_DIMS]
    program, _ = lower(residual_network(rng), fixed)
    plain = Case(
        residual_network(np.random.default_rng(0)).nodes,
        {"x": (BATCH.opt, 8, HEIGHT.opt, WIDTH.opt)},
        residual_network(np.random.default_rng(0)).weights,
    ).lower()
    assert [call.spec for call in program.launches] == [call.spec for call in plain.launches]


def test_memory_is_planned_for_the_largest_sizes(rng: Rng) -> None:
    program, _ = lower(image_case(node("Relu", "x", "y")), IMAGE_DIMS)
    largest = 4 * BATCH.max * 8 * HEIGHT.max * WIDTH.max
    assert program.workspace_bytes >= 2 * largest
    assert program.workspace_bytes < 2 * largest + 512


Emitter = Callable[[LoweringContext, Group], None]


def losing(how: Callable[[int], int]) -> Emitter:
    """A kernel that is told of sizes in a way that may lose their formulas."""

    def emit(program: LoweringContext, group: Group) -> None:
        view = program.read(group.root_operation.inputs[0])
        y = program.output_view(group.result)
        elements = how(y.shape[0]) * 8 * y.shape[2] * y.shape[3]
        call = make_launch(
            "elementwise",
            (elements, 1, 1),
            {"x0": view, "x1": None, "x2": None, "x3": None, "y": y, "elements": elements},
            {"BLOCK": 1, "EXPRESSION": ()},
            writes=(y,),
        )
        program.add_op(group.nodes, (call,))

    return emit


LOSSES: Mapping[str, Callable[[int], int]] = {
    "a plain number": int,
    "a product of numpy": lambda size: int(np.prod([size])),
    "a count": lambda size: len(range(size)),
    "a decision": lambda size: 2 * size if size > 2 else size,
    "a number of bits": lambda size: size.bit_length(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_kernel_that_loses_a_formula_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = image_case(node("Transpose", "x", "y", perm=[0, 1, 3, 2]))
    monkeypatch.setitem(OPERATIONS, "Transpose", OperatorRow(losing(lambda size: size)))
    lower(case, IMAGE_DIMS)
    monkeypatch.setitem(OPERATIONS, "Transpose", OperatorRow(losing(LOSSES[name])))
    with pytest.raises(NotCoveredError, match=r"'Transpose:y'.*batch=2.*batch=") as refusal:
        lower(case, IMAGE_DIMS)
    assert set(refusal.value.reasons) == {"Transpose:y"}


@pytest.fixture
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile into a cache that the tests of one run share."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "kernels"))


def test_int8_is_bit_by_bit_that_of_fixed_sizes(rng: Rng) -> None:
    case = integer_network(rng)
    program, dims = lower(case, IMAGE_DIMS, "int8")
    assert any(call.spec.exact for call in program.launches)
    for point in points(dims, rng):
        feeds = feeds_at(case, dims, point, rng)
        fixed = dataclasses.replace(case, inputs={"x": feeds["x"].shape}).lower("int8")
        actual = gpu_interpreter.run(program, feeds, point)["y"]
        np.testing.assert_array_equal(actual, gpu_interpreter.run(fixed, feeds)["y"])
        # The kernels multiply where onnxruntime divides: next to a half, one step more or less.
        assert np.abs(actual - case.truth(feeds)["y"]).max() <= 0.05 * 1.01


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_an_image_is_resized_to_a_size_that_is_read_in_steps(mode: str, rng: Rng) -> None:
    height = DimRange(name="height", min=6, opt=8, max=12)
    width = DimRange(name="width", min=6, opt=8, max=14)
    check(half_and_back(mode), in_steps((BATCH, height, width), 2), rng)
    with pytest.raises(NotCoveredError, match="constant scales"):
        lower(half_and_back(mode), (BATCH, height, width))


@pytest.mark.usefixtures("_own_cache")
def test_an_engine_takes_the_least_steps_that_its_kernels_need(tmp_path: Path) -> None:
    onnx.save(half_and_back("linear").model(), tmp_path / "m.onnx")
    dims = (
        DimRange(name="batch", min=8, opt=8, max=16),
        DimRange(name="height", min=32, opt=64, max=128),
        DimRange(name="width", min=6, opt=8, max=14),
    )
    path = tmp_path / "m.engine"
    built = build_on_gpu(
        tmp_path / "m.onnx", path, profile="orin-nano-8gb", precision="fp32", dims=dims
    )
    assert [dim.step for dim in built.dims] == [1, 2, 2]
    assert any("'height' goes in steps of 2" in note for note in built.notes)


@pytest.mark.usefixtures("_own_cache")
def test_an_engine_holds_formulas_and_arguments_in_the_order_of_the_kernel(
    tmp_path: Path, rng: Rng
) -> None:
    case = image_case(node("Relu", "x", "r"), node("Transpose", "r", "y", perm=[0, 2, 3, 1]))
    onnx.save(case.model(), tmp_path / "m.onnx")
    path = tmp_path / "m.engine"
    build_on_gpu(
        tmp_path / "m.onnx", path, profile="orin-nano-8gb", precision="fp32", dims=IMAGE_DIMS
    )
    with open_engine(path) as engine:
        manifest = engine.manifest
    assert manifest.dims == IMAGE_DIMS
    one = next(i for i in manifest.segments[0].implementations if isinstance(i, Cuda))
    assert one.inputs[0].shape == ("d0", 8, "d1", "d2")
    assert one.outputs[0].shape == ("d0", "d1", "d2", 8)
    assert one.outputs[0].bytes == 4 * 8 * BATCH.max * HEIGHT.max * WIDTH.max
    specs = [call.spec for call in lower(case, IMAGE_DIMS)[0].launches]
    launches = [launch for op in one.works for launch in op.tactics[0].launches]
    for spec, launch in zip(specs, launches, strict=True):
        (compiled,) = compile_kernels([spec], GpuTarget(87, 8))
        assert set(compiled.parameters) == {name for name, _ in spec.signature}
        order = list(kernel_function(spec.kernel, None).arg_names)
        positions = [order.index(name.split(".")[0]) for name in compiled.parameters]
        assert positions == sorted(positions)
        numbers = {name for name, kind in spec.signature if kind.startswith("i32")}
        kinds = [isinstance(argument, Int32) for argument in launch.arguments]
        assert kinds == [name in numbers for name in compiled.parameters] + [False, False]
    with open_session(path) as session:
        for point in points(IMAGE_DIMS, rng):
            feeds = feeds_at(case, IMAGE_DIMS, point, rng)
            np.testing.assert_array_equal(session.infer(feeds)["y"], case.truth(feeds)["y"])


ON_THE_GPU: Mapping[str, tuple[Callable[[Rng], Case], tuple[DimRange, ...]]] = {
    "residual": (residual_network, IMAGE_DIMS),
    "detector": (
        detector,
        (
            BATCH,
            DimRange(name="height", min=16, opt=64, max=128),
            DimRange(name="width", min=16, opt=64, max=160),
        ),
    ),
    "attention": (attention, (BATCH, DimRange(name="tokens", min=1, opt=100, max=300))),
}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ON_THE_GPU)
def test_one_engine_runs_all_sizes_of_its_range(
    name: str, precision: str, tmp_path: Path, rng: Rng
) -> None:
    if cuda.why_not() is not None:
        pytest.skip(str(cuda.why_not()))
    make, dims = ON_THE_GPU[name]
    case, path = make(rng), tmp_path / "m.engine"
    onnx.save(case.model(), tmp_path / "m.onnx")
    built = build_on_gpu(tmp_path / "m.onnx", path, profile="h200", precision=precision, dims=dims)
    limit = {"fp32": 1e-4, "fp16": 1e-2}[precision]
    with open_session(path) as session:
        assert [report.implementation for report in session.reports] == ["cuda"]
        # More sets of sizes than graphs are kept, and the first again.
        sets = [points(built.dims, rng) for _ in range(7)]
        for point in (*(point for some in sets for point in some), sets[0][0]):
            feeds = feeds_at(case, built.dims, point, rng)
            outputs = session.infer(feeds)
            for output, truth in case.truth(feeds).items():
                assert outputs[output].shape == truth.shape
                assert relative_error(outputs[output], truth) < limit, point
        beyond = [dim.max + dim.step for dim in built.dims]
        with pytest.raises(SessionError, match=f"{built.dims[0].min} to {built.dims[0].max}"):
            session.infer(feeds_at(case, built.dims, beyond, rng))
