"""`tandem surgeon pixels`: a model takes bytes, and computes what it did."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from model_fixtures import small_convnet

from toolkit.cli.main import tandem
from toolkit.errors import SurgeonError
from toolkit.surgeon.pixels import take_pixels

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SHAPE = (1, 3, 32, 32)


@pytest.fixture
def model(tmp_path: Path, rng: np.random.Generator) -> Path:
    return small_convnet(tmp_path / "m.onnx", rng)


def run(path: Path, x: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    (value,) = session.get_inputs()
    result: np.ndarray = session.run(None, {value.name: x})[0]
    return result


def pixels(model: Path, *arguments: str) -> Path:
    out = model.with_name("p.onnx")
    done = CliRunner().invoke(tandem, ["surgeon", "pixels", str(model), "-o", str(out), *arguments])
    assert done.exit_code == 0, done.output
    return out


@pytest.mark.parametrize("dtype", ["uint8", "float16"])
def test_pixels_become_what_the_model_took(
    model: Path, dtype: str, rng: np.random.Generator
) -> None:
    numbers = [str(n) for m in MEAN for n in ("--mean", m)]
    numbers += [str(n) for s in STD for n in ("--std", s)]
    out = pixels(model, "--dtype", dtype, "--scale", str(1 / 255), *numbers)
    x = rng.integers(0, 256, SHAPE).astype(dtype)
    mean, std = (np.reshape(values, (3, 1, 1)) for values in (MEAN, STD))
    expected = run(model, ((x.astype(np.float64) / 255 - mean) / std).astype(np.float32))
    assert np.allclose(run(out, x), expected, rtol=1e-4, atol=1e-5)


def test_a_cast_alone_without_numbers(model: Path) -> None:
    before, after = onnx.load(model), onnx.load(pixels(model))
    assert len(after.graph.node) == len(before.graph.node) + 1
    assert after.graph.input[0].name == before.graph.input[0].name
    assert after.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.UINT8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "z"}, "the model has no input 'z'"),
        ({"mean": (1.0, 2.0)}, "mean and std have 2 numbers"),
        ({"mean": (1.0, 2.0, 3.0), "std": (1.0, 2.0)}, "mean has 3 numbers, std 2"),
        ({"std": (0.0,)}, "give numbers above 0"),
        ({"std": (float("nan"),)}, "give numbers above 0"),
    ],
)
def test_what_does_not_fit_is_refused(
    model: Path, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(SurgeonError, match=message):
        take_pixels(ir.load(model), **{"name": None, **arguments})  # type: ignore[arg-type]


def test_an_input_of_integers_is_no_image(model: Path) -> None:
    taken = ir.load(pixels(model))
    with pytest.raises(SurgeonError, match="pixels can stand for float32"):
        take_pixels(taken, None)
