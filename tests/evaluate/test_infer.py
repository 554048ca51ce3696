"""`tandem infer`: models and engines on files and random inputs; what is saved is read again."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner, Result
from model_fixtures import save, small_convnet
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from device.errors import TandemError
from toolkit.build import BuildOptions, build_engine
from toolkit.cli.main import tandem
from toolkit.evaluate.infer.inputs import InputRequest, make_samples
from toolkit.evaluate.infer.runner import Input, kind_of
from toolkit.evaluate.infer.saved import load_samples, save_samples

Files = tuple[Path, Path]
FILES = Path(__file__).parents[1] / "data" / "quantized_elsewhere"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A model and its FP32 engine for the laptop."""
    folder = tmp_path_factory.mktemp("infer")
    model = small_convnet(folder / "net.onnx", np.random.default_rng())
    return model, build_engine(model, "laptop", folder / "net.engine", BuildOptions()).path


def run(*arguments: object, check: bool = True) -> Result:
    done = CliRunner().invoke(tandem, ["infer", *map(str, arguments)], catch_exceptions=False)
    assert not check or done.exit_code == 0, done.output
    return done


@pytest.mark.parametrize("index", [0, 1], ids=["model", "engine"])
def test_outputs_are_those_of_the_reference(
    files: Files, index: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    x = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    run(files[index], "--input", tmp_path / "x.npz", "--save", tmp_path / "y.npz")
    (expected,) = ReferenceEvaluator(onnx.load(files[0])).run(None, {"x": x})
    with np.load(tmp_path / "y.npz") as archive:
        np.testing.assert_allclose(archive["y"], expected, rtol=1e-3, atol=1e-4)


def test_a_relu_before_fp8_is_computed(tmp_path: Path, rng: np.random.Generator) -> None:
    """An optimizer of onnxruntime drops it, as it may before INT8 with a zero point of -128."""
    model = FILES / "modelopt_fp8_fp32.onnx"
    (value,) = onnx.load(model).graph.input
    shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    x = rng.normal(size=shape).astype(np.float32)
    np.savez(tmp_path / "x.npz", **{value.name: x})
    run(model, "--input", tmp_path / "x.npz", "--save", tmp_path / "y.npz")
    plain = onnxruntime.SessionOptions()
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model, plain, providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {value.name: x})
    with np.load(tmp_path / "y.npz") as outputs:
        (actual,) = outputs.values()
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize("products", [1, 2])
def test_the_products_of_a_qdq_model_are_exact_on_every_cpu(
    tmp_path: Path, rng: np.random.Generator, products: int
) -> None:
    """Two products of 127 * 127 do not fit the 16 bits of the fast way of CPUs without VNNI.

    onnxruntime's exact way takes no weights that two products share.
    """
    constants = {
        "one": np.float32(1),
        "zero": np.int8(0),
        "wide": np.float32(2**13),
        "w": rng.integers(100, 128, size=(64, 8), dtype=np.int8),
    }
    nodes = [helper.make_node("DequantizeLinear", ["w", "one", "zero"], ["wd"])]
    for at in range(products):
        nodes += [
            helper.make_node("QuantizeLinear", [f"x{at}", "one", "zero"], [f"xq{at}"]),
            helper.make_node("DequantizeLinear", [f"xq{at}", "one", "zero"], [f"xd{at}"]),
            helper.make_node("MatMul", [f"xd{at}", "wd"], [f"y_full{at}"]),
            helper.make_node("QuantizeLinear", [f"y_full{at}", "wide", "zero"], [f"yq{at}"]),
            helper.make_node("DequantizeLinear", [f"yq{at}", "wide", "zero"], [f"y{at}"]),
        ]
    inputs = {f"x{at}": (4, 64) for at in range(products)}
    outputs = {f"y{at}": (4, 8) for at in range(products)}
    path = save(tmp_path / "m.onnx", nodes, inputs, outputs, constants)
    feeds = {
        name: rng.integers(100, 128, size=size).astype(np.float32) for name, size in inputs.items()
    }
    np.savez(tmp_path / "x.npz", **feeds)
    run(path, "--input", tmp_path / "x.npz", "--save", tmp_path / "y.npz")
    with np.load(tmp_path / "y.npz") as saved:
        for at in range(products):
            exact = feeds[f"x{at}"] @ constants["w"].astype(np.float32)
            np.testing.assert_allclose(saved[f"y{at}"], exact, atol=2**12 + 1)


def test_random_inputs_are_those_of_their_seed(files: Files, tmp_path: Path) -> None:
    def inputs(seed: int) -> np.ndarray:
        path = tmp_path / f"{seed}.npz"
        run(files[0], "--random", seed, "--samples", 2, "--save-inputs", path)
        return np.stack([sample["x"] for sample in load_samples(path)])

    assert np.array_equal(inputs(3), inputs(3))
    assert not np.array_equal(inputs(3), inputs(4))
    assert not np.array_equal(*inputs(3))


def test_an_array_or_raw_bytes_are_the_input_that_they_are_named_for(
    files: Files, tmp_path: Path, rng: np.random.Generator
) -> None:
    x = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "x.bin").write_bytes(x.tobytes())
    shown = [
        json.loads(run(files[0], "--input", given, "--json").stdout)["samples"]
        for given in (tmp_path / "x.npy", f"x={tmp_path / 'x.npy'}", f"x={tmp_path / 'x.bin'}")
    ]
    assert shown[0] == shown[1] == shown[2]


def test_every_tensor_of_a_model_is_shown(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "all.npz"
    run(files[0], "--all", "--save", path)
    (sample,) = load_samples(path)
    outputs = {name for node in onnx.load(files[0]).graph.node for name in node.output}
    assert set(sample) == outputs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--input", "none.npz"), "none.npz"),
        (("--input", "wrong.npz"), "lack 'x' and hold the unknown 'z'; it takes 'x' float32"),
        (("--input", "shape.npz"), "has the shape 1x3x8x8; it takes 'x' float32 1x3x32x32"),
        (("--input", "short.npz"), "x.*is complex64"),
        (("--data", "shape.npz", "--shape", "x=1x2"), "does not fit the input 'x' float32"),
        (("--shape", "z=1x2"), "there is no such input; there are x"),
        (("--shape", "x=1x2"), "does not fit the input 'x' float32 1x3x32x32"),
        (("--input", "z=shape.npy"), "there is no input 'z'; give one of x=shape.npy"),
        (("--input", "x=few.bin"), "has 3 bytes, but 'x' float32 .* takes 12288"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...],
    message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    np.savez("wrong.npz", z=np.zeros((1, 3, 32, 32), np.float32))
    np.savez("shape.npz", x=np.zeros((1, 3, 8, 8), np.float32))
    np.savez("short.npz", x=np.zeros((1, 3, 32, 32), np.complex64))
    np.save("shape.npy", np.zeros(3))
    Path("few.bin").write_bytes(b"abc")
    with pytest.raises(TandemError, match=message):
        run(files[0], *arguments)


def test_two_sources_of_inputs_are_a_usage_error(files: Files) -> None:
    assert run(files[0], "--random", 1, "--data", "d", check=False).exit_code == 2


def test_samples_are_read_as_they_were_saved(tmp_path: Path, rng: np.random.Generator) -> None:
    names = ("file", "a:0", "/model/conv/Conv_output_0", "1:0")
    for count in (1, 3):
        samples = [{name: rng.normal(size=(2, n + 1)) for name in names} for n in range(count)]
        save_samples(tmp_path / "s.npz", samples)
        again = load_samples(tmp_path / "s.npz")
        assert [list(sample) for sample in again] == [list(names)] * count
        for one, second in zip(samples, again, strict=True):
            assert all(np.array_equal(one[name], second[name]) for name in names)


def test_names_of_tensorflow_are_no_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", **{"0:x": np.zeros(1), "0:y": np.zeros(1), "input:0": np.ones(2)})
    (sample,) = load_samples(tmp_path / "t.npz")
    assert set(sample) == {"0:x", "0:y", "input:0"}


def test_random_samples_beyond_the_limit_are_refused_by_the_name_of_the_file() -> None:
    huge = (Input("x", "float32", (1, 2**31, 32, 32)),)
    with pytest.raises(TandemError, match=r"^m\.onnx: 1 random samples of 8\.0 TiB each, .* 'x'"):
        make_samples(InputRequest(), huge, "m.onnx")


def test_random_numbers_keep_to_type_and_range() -> None:
    inputs = tuple(
        Input(name, name, (4000,)) for name in ("float32", "uint8", "int8", "bool", "int64")
    )
    (sample,) = make_samples(InputRequest(seed=5), inputs, "m.onnx")
    assert {name: array.dtype.name for name, array in sample.items()} == {n: n for n in sample}
    assert abs(sample["float32"].mean()) < 0.1
    assert abs(sample["float32"].std() - 1) < 0.1
    assert {(sample[n].min(), sample[n].max()) for n in ("uint8", "int8")} == {
        (0, 255),
        (-128, 127),
    }
    assert set(sample["int64"]) == {0, 1}
    request = InputRequest(ranges={"int64": (7, 9), "float32": (2, 3)})
    (sample,) = make_samples(request, inputs, "m.onnx")
    assert set(sample["int64"]) == {7, 8, 9}
    assert 2 <= sample["float32"].min() < sample["float32"].max() <= 3


def test_a_dynamic_dimension_takes_the_size_asked_for(tmp_path: Path) -> None:
    model = save(
        tmp_path / "d.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": ["n", 4]},
        {"y": ["n", 4]},
    )  # fmt: skip
    shown = json.loads(run(model, "--shape", "x=5x4", "--json").stdout)
    assert shown["samples"][0]["y"]["shape"] == [5, 4]


def test_halves_are_fed_to_a_model_of_halves(tmp_path: Path, rng: np.random.Generator) -> None:
    model = save(
        tmp_path / "h.onnx", [helper.make_node("Neg", ["x"], ["y"])], {"x": [3]}, {"y": [3]},
        dtype=TensorProto.FLOAT16,
    )  # fmt: skip
    x = rng.normal(size=3).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    run(model, "--input", tmp_path / "x.npz", "--save", tmp_path / "y.npz")
    assert np.array_equal(load_samples(tmp_path / "y.npz")[0]["y"], -x.astype(np.float16))


def test_the_kind_of_a_file_without_a_suffix_is_read_from_it(files: Files, tmp_path: Path) -> None:
    for source, kind in zip(files, ("model", "engine"), strict=True):
        copy = tmp_path / kind
        copy.write_bytes(source.read_bytes())
        assert kind_of(copy) == kind
    (tmp_path / "text").write_text("hello there")
    with pytest.raises(TandemError, match="no ONNX model"):
        kind_of(tmp_path / "text")
