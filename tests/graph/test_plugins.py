"""Operators of plugins: the shipped example on CPU and GPU, and what is refused how."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import gpu_interpreter
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from cli_fixtures import invoke, output_of, status_of
from gpu_graphs import ORIN
from model_fixtures import save
from onnx import helper
from onnx.parser import parse_function

from calibration.table import read_table
from device.engine.manifest import DimRange
from device.runtime.executors import cuda
from device.runtime.session import open_session
from toolkit.engine.build import BuildOptions, BuildResult, build_engine
from toolkit.errors import PluginError
from toolkit.gpu.codegen import cuda_source
from toolkit.gpu.codegen.compile_kernels import compile_kernels
from toolkit.gpu.codegen.cuda_source import COMPILERS, CudaCompiler, compile_source, find_compiler
from toolkit.gpu.codegen.triton_version import has_compiler
from toolkit.gpu.emit import plugins as plugins_emit
from toolkit.gpu.errors import CompileError, NotCoveredError
from toolkit.gpu.lower import KernelProgram, lower_segment
from toolkit.gpu.shapes.inference import traces_of
from toolkit.graph.extract import extract_segments
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.plugins import Kernel, Launch, Node, Plugin, Tensor
from toolkit.plugins.functions import give_shapes
from toolkit.plugins.load import load_plugins
from toolkit.quantize.ranges.measure import RangeOptions

EXAMPLE = Path(__file__).parents[2] / "examples" / "stereo" / "plugin.py"
STEREO = load_plugins(EXAMPLE)
COST, DISPARITY = STEREO
LIMITS = {"fp32": 1e-4, "fp16": 1e-2}

needs_triton = pytest.mark.skipif(not has_compiler(), reason="Triton is not installed")
needs_cuda = pytest.mark.skipif(
    find_compiler() is None, reason="neither nvcc nor NVRTC is installed"
)


def call(plugin: Plugin, inputs: str, output: str, **attributes: object) -> onnx.NodeProto:
    """A node of a plugin's operator, as a model file holds it."""
    function = plugin.function
    return helper.make_node(
        function.name,
        inputs.split(),
        [output],
        name=f"{function.name}:{output}",
        domain=function.domain,
        **attributes,
    )


def write(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int | str, ...]],
    rank: int,
) -> Path:
    save(path, nodes, dict(inputs), {"y": (None,) * rank})
    model = onnx.load(path)
    for domain in {node.domain for node in nodes} - {"", *(o.domain for o in model.opset_import)}:
        model.opset_import.append(helper.make_opsetid(domain, 1))
    onnx.save(model, path)
    return path


def stereo_model(path: Path, shape: tuple[int, int, int, int], disparities: int) -> Path:
    nodes = [
        call(COST, "left right", "cost", disparities=disparities),
        call(DISPARITY, "cost", "soft"),
        helper.make_node("Relu", ["soft"], ["y"], name="relu"),
    ]
    return write(path, nodes, {"left": shape, "right": shape}, 3)


def random_feeds(rng: np.random.Generator, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {n: rng.normal(size=shape).astype(np.float32) for n in ("left", "right")}


def cost_of(feeds: Mapping[str, np.ndarray], disparities: int) -> np.ndarray:
    """The first formula of the example, in float64."""
    left, right = feeds["left"].astype(np.float64), feeds["right"].astype(np.float64)
    batch, _, height, width = left.shape
    cost = np.zeros((batch, disparities, height, width))
    for d in range(min(disparities, width)):
        cost[:, d, :, d:] = (left[..., d:] * right[..., : width - d]).mean(1)
    return cost


def disparity_of(cost: np.ndarray) -> np.ndarray:
    share = np.exp(cost - cost.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    return np.einsum("d,ndyx->nyx", np.arange(cost.shape[1]), share)


def sizes(rng: np.random.Generator) -> tuple[tuple[int, int, int, int], int]:
    batch, channels, height, width = (int(n) for n in rng.integers(1, (3, 9, 7, 80)))
    return (batch, channels, height, width), int(rng.integers(1, 9))


def build(model: Path, profile: str = "laptop", **options: object) -> BuildResult:
    given = BuildOptions(plugins=STEREO, **options)  # type: ignore[arg-type]
    return build_engine(model, profile, model.with_suffix(".engine"), given)


def lower(
    model: Path,
    plugins: Sequence[Plugin] = STEREO,
    precision: str = "fp16",
    dims: Sequence[DimRange] = (),
) -> KernelProgram:
    graph, _ = run_passes(import_model(model, plugins=plugins, dims=dims).model)
    give_shapes(graph, plugins)
    homes = {str(node.name): "gpu0" for node in graph.graph}
    (piece,) = extract_segments(graph, homes, ["gpu0"])
    return lower_segment(
        piece.model,
        gpu=ORIN,
        precision=precision,
        plugins=plugins,
        traces=traces_of(dims, plugins),
    )


@pytest.fixture
def with_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft kernels in CUDA C++ whether this host could compile them or not."""
    monkeypatch.setattr(plugins_emit, "find_compiler", lambda: "some")


def test_the_example_computes_its_formulas_where_there_is_no_gpu(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    for _ in range(5):
        shape, disparities = sizes(rng)
        result = build(stereo_model(tmp_path / "m.onnx", shape, disparities))
        feeds = random_feeds(rng, shape)
        with open_session(result.path) as session:
            actual = session.infer(feeds)["y"]
        truth = disparity_of(cost_of(feeds, disparities))
        np.testing.assert_allclose(actual, truth, rtol=1e-4, atol=1e-5)


def test_int8_ranges_are_measured_through_a_plugin(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    shape = (1, 4, 5, 24)
    samples = [random_feeds(rng, shape) for _ in range(3)]
    model = stereo_model(tmp_path / "m.onnx", shape, 4)
    result = build(model, "orin-nano-8gb", data=samples, ranges=RangeOptions("minmax"))
    assert result.calibration is not None
    cost = max(float(np.abs(cost_of(one, 4)).max()) for one in samples)
    assert result.calibration.table.tensors["cost"] == pytest.approx(cost, rel=1e-5)


@pytest.mark.usefixtures("with_compiler")
def test_an_operator_of_a_plugin_is_one_node_of_the_gpu(tmp_path: Path) -> None:
    program = lower(stereo_model(tmp_path / "m.onnx", (1, 4, 5, 24), 4))
    kernels = {op.nodes: op.tactics[0][-1].spec for op in program.ops if op.nodes}
    assert kernels["CostVolume:cost",].kernel == "cost_volume"
    assert kernels["SoftDisparity:soft",].kernel == "soft_disparity"


@pytest.mark.usefixtures("with_compiler")
@pytest.mark.parametrize(("precision", "kind"), [("fp16", "*fp16"), ("bf16", "*fp32")])
def test_tensors_are_converted_to_the_types_that_a_kernel_takes(
    tmp_path: Path, precision: str, kind: str
) -> None:
    """BF16 that a kernel does not take becomes FP32, not FP16, which does not hold it."""
    program = lower(stereo_model(tmp_path / "m.onnx", (1, 4, 5, 24), 4), precision=precision)
    types = {
        one.spec.kernel: [kind.split(":")[0] for _, kind in one.spec.signature]
        for one in program.launches
    }
    assert types["cost_volume"] == [kind, kind, kind, "i32", "i32"]
    assert types["soft_disparity"] == ["*fp32", "*fp32", "i32", "i32"]


@needs_triton
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_example_s_triton_kernel_computes_what_its_function_does(
    tmp_path: Path, rng: np.random.Generator, precision: str
) -> None:
    for _ in range(3):
        shape, disparities = sizes(rng)
        node = call(COST, "left right", "y", disparities=disparities)
        model = write(tmp_path / "m.onnx", [node], dict.fromkeys(("left", "right"), shape), 4)
        feeds = random_feeds(rng, shape)
        actual = gpu_interpreter.run(lower(model, precision=precision), feeds)["y"]
        graph = import_model(model, plugins=STEREO).model
        session = ort.InferenceSession(ir.to_proto(graph).SerializeToString())
        (truth,) = session.run(None, feeds)
        assert actual.shape == truth.shape
        difference = np.linalg.norm(actual - truth)
        assert difference <= LIMITS[precision] * np.linalg.norm(truth)


@needs_triton
def test_the_example_s_triton_kernel_takes_every_size_of_a_range(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    dims = [
        DimRange(name="batch", min=1, opt=2, max=3),
        DimRange(name="height", min=2, opt=4, max=6),
        DimRange(name="width", min=5, opt=60, max=90),
    ]
    sides = dict.fromkeys(("left", "right"), ("batch", 4, "height", "width"))
    node = call(COST, "left right", "y", disparities=6)
    model = write(tmp_path / "m.onnx", [node], sides, 4)
    program = lower(model, precision="fp32", dims=dims)
    between = tuple(int(rng.integers(dim.min, dim.max + 1)) for dim in dims)
    for batch, height, width in ((1, 2, 5), (3, 6, 90), between):
        feeds = random_feeds(rng, (batch, 4, height, width))
        actual = gpu_interpreter.run(program, feeds, (batch, height, width))["y"]
        np.testing.assert_allclose(actual, cost_of(feeds, 6), rtol=1e-4, atol=1e-5)


def test_a_constant_that_follows_a_dynamic_dimension_is_refused(tmp_path: Path) -> None:
    def launches(node: Node) -> list[Launch]:
        result = launch(node, EXAMPLE.with_name("cost_volume.py"), y=node.outputs[0])
        return [replace(result, constants={"ROWS": node.input(0).shape[0]})]

    model = write(tmp_path / "m.onnx", [call(doubler(), "x", "y")], {"x": ("rows", 3)}, 2)
    dims = [DimRange(name="rows", min=1, opt=2, max=3)]
    with pytest.raises(NotCoveredError, match="'ROWS' of kernel odd follows a dynamic dimension"):
        lower(model, [doubler(launches=launches)], dims=dims)


@needs_triton
@pytest.mark.parametrize("sm", [72, 87])
def test_the_example_s_kernels_compile_for_boards(
    tmp_path: Path, sm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gpu = replace(ORIN, sm=sm)
    specs = {
        one.spec.kernel: one.spec
        for one in lower(stereo_model(tmp_path / "m.onnx", (1, 4, 5, 24), 4)).launches
        if one.spec.source is not None
    }
    result = find_compiler()
    if result is None or (sm == 72 and result.version.startswith("nvcc 13")):
        specs.pop("soft_disparity", None)  # CUDA 13 ends at sm_75
    for compiled in compile_kernels(tuple(specs.values()), gpu):
        assert compiled is not None
        assert compiled.cubin.startswith(b"\x7fELF")
        assert compiled.function in specs
        assert compiled.threads == 128
        assert str(EXAMPLE.parent).encode() not in compiled.cubin


@pytest.mark.parametrize("find", COMPILERS)
def test_each_compiler_of_cuda_makes_cubins_without_a_gpu(
    find: Callable[[], CudaCompiler | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = find()
    if compiler is None:
        pytest.skip(f"{find.__name__} is not installed")
    monkeypatch.setattr(cuda_source, "COMPILERS", (find,))
    file = EXAMPLE.with_name("soft_disparity.cu")
    constants = {"DISPARITIES": 5}
    cubin = compile_source(file, "soft_disparity", constants, 87)
    assert cubin.startswith(b"\x7fELF")
    assert cubin != compile_source(file, "soft_disparity", {"DISPARITIES": 6}, 87)
    with pytest.raises(CompileError, match=r"soft_disparity.cu\(\d+\): error: .*\"DISPARITIES\""):
        compile_source(file, "soft_disparity", {}, 87)
    with pytest.raises(CompileError, match=r"holds no function .* soft"):
        compile_source(file, "soft", constants, 87)


@needs_triton
@needs_cuda
def test_what_compilers_say_names_kernel_operator_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    broken = {
        "odd.cu": 'extern "C" __global__ void odd(float* y) { y[0] = nothing; }',
        "lost.cu": "__global__ void odd(float* y) { y[0] = 0; }",
        "odd.py": "import triton\n\n\n@triton.jit\ndef odd(y):\n    nothing(y)\n",
    }
    for name, text in broken.items():
        file = tmp_path / name
        file.write_text(text)
        plugin = doubler(launches=lambda node, f=file: [launch(node, f, y=node.outputs[0])])
        (spec,) = [
            one.spec for one in lower(doubled(tmp_path), [plugin]).launches if one.spec.source
        ]
        with pytest.raises(CompileError) as caught:
            compile_kernels([spec], ORIN)
        for message in ("odd", "my.domain::Double", str(file), "sm_87"):
            assert message in str(caught.value)


@needs_triton
@needs_cuda
def test_a_kernel_file_that_changes_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "odd.cu"
    cubins = []
    for factor in (2, 3):
        file.write_text(f'extern "C" __global__ void odd(float* y) {{ y[0] *= {factor}; }}')
        plugin = doubler(launches=lambda node: [launch(node, file, y=node.outputs[0])])
        specs = [c.spec for c in lower(doubled(tmp_path), [plugin]).launches if c.spec.source]
        (compiled,) = compile_kernels(specs, ORIN)
        assert compiled is not None
        cubins.append(compiled.cubin)
    assert cubins[0] != cubins[1]
    file.write_text("// changed after lowering")
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(CompileError, match="changed during the build"):
        compile_kernels(specs, ORIN)


def test_without_a_cuda_compiler_the_node_runs_portable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins_emit, "find_compiler", lambda: None)
    with pytest.raises(NotCoveredError, match="nvidia-cuda-nvrtc") as caught:
        lower(stereo_model(tmp_path / "m.onnx", (1, 4, 5, 24), 4))
    assert list(caught.value.reasons) == ["SoftDisparity:soft"]


def doubler(**changes: object) -> Plugin:
    """y = factor * x, with a launch that nothing can start."""
    text = """<domain: "my.domain", opset_import: ["" : 19]>
        Double <factor: float = 2.0> (x) => (y) {
            f = Constant <value_float: float = @factor> ()
            y = Mul (x, f)
        }"""
    plugin = Plugin(
        parse_function(text),
        shapes=lambda node: [node.input(0).shape],
        launches=lambda node: [
            launch(node, EXAMPLE.with_name("cost_volume.py"), x=node.input(0), y=node.outputs[0])
        ],
    )
    return replace(plugin, **changes)


def launch(node: Node, file: Path, **arguments: Tensor | int) -> Launch:
    return Launch(Kernel(file, "odd"), (1, 1, 1), arguments)


def doubled(folder: Path, **attributes: object) -> Path:
    node = call(doubler(), "x", "y", **attributes)
    return write(folder / "d.onnx", [node], {"x": (2, 3)}, 2)


@pytest.mark.parametrize(("given", "factor"), [({}, 2.0), ({"factor": 3.0}, 3.0)])
def test_kernels_see_attributes_with_their_defaults(
    tmp_path: Path, given: dict[str, float], factor: float
) -> None:
    seen = []

    def launches(node: Node) -> list[Launch]:
        seen.append(node.number("factor"))
        return [launch(node, EXAMPLE.with_name("cost_volume.py"), y=node.outputs[0])]

    lower(doubled(tmp_path, **given), [doubler(launches=launches)])
    assert seen == [factor]


def fail(_: Node) -> list[Launch]:
    raise KeyError("something")


def wrong_function(**changes: str) -> onnx.FunctionProto:
    function = onnx.FunctionProto()
    function.CopyFrom(doubler().function)
    if "domain" in changes:
        function.domain = changes["domain"]
    if "op" in changes:
        function.node[1].op_type = changes["op"]
    return function


REFUSED: dict[str, tuple[Callable[[], Sequence[Plugin]], dict[str, object], str]] = {
    "shapes that differ": (
        lambda: [doubler(shapes=lambda node: [(3, 2)])],
        {},
        r"my.domain::Double: its shape function gives \[3, 2\] for 'y', its function in ONNX \[2",
    ),
    "shapes of another number": (
        lambda: [doubler(shapes=lambda node: [])],
        {},
        "gives 0 shapes for node 'Double:y', which has 1 outputs",
    ),
    "a shape function that fails": (
        lambda: [doubler(shapes=fail)],
        {},
        "shape function fails on node 'Double:y'",
    ),
    "launches that fail": (
        lambda: [doubler(launches=fail)],
        {},
        "launches fail on node 'Double:y': KeyError: 'something'",
    ),
    "no launches": (lambda: [doubler(launches=lambda node: [])], {}, "at least one"),
    "an argument of nowhere": (
        lambda: [
            doubler(
                launches=lambda node: [
                    launch(node, EXAMPLE, y=Tensor("elsewhere", "float32", (1,)))
                ]
            )
        ],
        {},
        "argument 'y' of kernel odd is .*elsewhere",
    ),
    "a kernel file of another kind": (
        lambda: [doubler(launches=lambda n: [launch(n, Path("a.cpp"), y=n.outputs[0])])],
        {},
        r"a.cpp must end in .py \(Triton\) or .cu",
    ),
    "a kernel file that is not there": (
        lambda: [doubler(launches=lambda n: [launch(n, Path("a.py"), y=n.outputs[0])])],
        {},
        "a.py cannot be read: No such file",
    ),
    "an attribute that nobody knows": (
        lambda: [doubler()],
        {"power": 2.0},
        "attribute 'power', which my.domain::Double does not know; it takes: factor",
    ),
    "an attribute that is a tensor": (
        lambda: [doubler()],
        {"factor": helper.make_tensor("t", 1, [1], [2.0])},
        "of type TENSOR",
    ),
    "the same operator twice": (
        lambda: [doubler(), doubler()],
        {},
        "my.domain::Double is made by 2 plugins",
    ),
    "a domain of ONNX": (
        lambda: [doubler(function=wrong_function(domain="com.microsoft"))],
        {},
        "domain 'com.microsoft' is taken",
    ),
    "a function that is no ONNX": (
        lambda: [doubler(function=wrong_function(op="Multiply"))],
        {},
        "my.domain::Double: its function is not valid ONNX",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plugin_that_does_not_do_what_it_says_is_named(name: str, tmp_path: Path) -> None:
    plugins, attributes, message = REFUSED[name]
    model = doubled(tmp_path, **attributes)
    with pytest.raises(PluginError, match=message):
        lower(model, plugins())


def test_a_function_of_another_opset_is_refused_where_it_means_something_else(
    tmp_path: Path,
) -> None:
    text = """<domain: "my.domain", opset_import: ["" : 12]>
        Double <factor: float = 2.0> (x) => (y) {
            s = ReduceSum <axes = [1], keepdims = 1> (x)
            y = Sub (s, x)
        }"""
    plugin = doubler(function=parse_function(text))
    with pytest.raises(PluginError, match="ReduceSum of opset 12 is another one in opset 19"):
        lower(doubled(tmp_path), [plugin])


FILES = {
    "": (None, "there is no plugin file"),
    "empty.py": ("", "ends in no tuple PLUGINS"),
    "list.py": ("PLUGINS = []", "ends in no tuple PLUGINS"),
    "other.py": ("PLUGINS = (1,)", "ends in no tuple PLUGINS"),
    "exits.py": ("import sys; sys.exit(0)", "does not run: SystemExit"),
    "fails.py": ("import nothing_that_exists", "does not run: ModuleNotFoundError"),
    "text.txt": ("PLUGINS = ()", "does not run: ImportError"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_plugin_file_that_is_none_is_named(name: str, tmp_path: Path) -> None:
    text, message = FILES[name]
    path = tmp_path / (name or "missing.py")
    if text is not None:
        path.write_text(text)
    with pytest.raises(PluginError, match=message) as caught:
        load_plugins(path)
    assert str(path) in str(caught.value)


def test_the_command_takes_plugin_files(tmp_path: Path, rng: np.random.Generator) -> None:
    shape = (1, 4, 5, 24)
    model = stereo_model(tmp_path / "m.onnx", shape, 4)
    refused = invoke("build", model)
    assert status_of(refused) == 1
    assert "add it with `tandem build --plugin`" in str(refused.exception)
    output_of("build", model, "--plugin", EXAMPLE)
    feeds = random_feeds(rng, shape)
    with open_session(model.with_suffix(".engine")) as session:
        actual = session.infer(feeds)["y"]
    np.testing.assert_allclose(actual, disparity_of(cost_of(feeds, 4)), rtol=1e-4, atol=1e-5)


def test_the_example_finds_how_far_a_texture_is_shifted(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = tmp_path / "stereo.onnx"
    command = [sys.executable, str(EXAMPLE.with_name("make_model.py")), str(model)]
    subprocess.run(command, check=True)
    result = build(model)
    scene = rng.normal(size=(1, 1, 96, 200)).astype(np.float32)
    shift = int(rng.integers(0, 20))
    left, right = scene[..., 20:180], scene[..., 20 + shift : 180 + shift]
    with open_session(result.path) as session:
        actual = session.infer({"left": left, "right": right})["disparity"]
    assert np.abs(actual[:, 4:-4, 28:-4] - shift).mean() < 0.1


def test_commands_that_read_a_model_take_plugins(tmp_path: Path, rng: np.random.Generator) -> None:
    shape = (1, 4, 5, 24)
    model = stereo_model(tmp_path / "m.onnx", shape, 4)
    data = tmp_path / "data"
    data.mkdir()
    np.savez(data / "0.npz", **random_feeds(rng, shape))
    reports = {}
    for name, *options in (("plan", "--profile", "orin-nx-16gb"), ("calibrate", "--data", data)):
        reports[name] = output_of(name, model, *options, "--plugin", EXAMPLE)
    assert "operator CostVolume of domain tandem.stereo" in reports["plan"]  # off the DLA, and why
    assert "cost" in read_table(model.with_suffix(".calib.json")).tensors


def test_a_plugin_that_no_node_asks_for_is_said(tmp_path: Path) -> None:
    relu = helper.make_node("Relu", ["x"], ["y"], name="relu")
    result = build(write(tmp_path / "m.onnx", [relu], {"x": (2, 3)}, 2))
    assert "the plugin tandem.stereo::CostVolume is used by no node" in result.notes


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_example_computes_the_same_on_a_gpu(
    precision: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    if cuda.why_not() is not None:
        pytest.skip(str(cuda.why_not()))
    shape = (2, 32, 48, 96)
    model = stereo_model(tmp_path / "m.onnx", shape, 24)
    result = build(model, "h200", precision=precision)
    feeds = random_feeds(rng, shape)
    with open_session(result.path) as session:
        assert "cuda" in [one.implementation for one in session.reports]
        actual = session.infer(feeds)["y"]
    truth = disparity_of(cost_of(feeds, 24))
    assert np.linalg.norm(actual - truth) < LIMITS[precision] * np.linalg.norm(truth)
