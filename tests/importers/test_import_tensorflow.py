"""TensorFlow and Keras models: engines compute what TensorFlow computes, under its names."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from import_page import run_command_of_page
from numpy.typing import NDArray
from onnx import TensorProto, helper, save
from tensorflow_fixtures import tensorflow  # noqa: F401  (fixtures)

import tandem
from toolkit.cli.main import tandem as command_line
from toolkit.importers import tensorflow_export
from toolkit.importers.onnx import source_path
from toolkit.importers.tensorflow import REQUIREMENTS, VARIABLE

FP32_ERROR = 1e-4  # of the largest output
Arrays = Mapping[str, NDArray[Any]]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `make` was asked for in one run of TensorFlow: a folder of each kind."""
    return tmp_path_factory.mktemp("tensorflow")


QUICK_KINDS = ("saved_model", "tflite")  # what every run of the tests needs


def make(python: Path, kind: str, models: Path, folder: Path) -> tuple[Arrays, Arrays]:
    """Let TensorFlow write a model to a folder; return inputs and outputs of its run, by name."""
    if not (models / kind).exists():
        kinds = QUICK_KINDS if kind in QUICK_KINDS else (kind,)
        script = Path(__file__).parents[1] / "fixtures" / "tensorflow_models.py"
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
        command = [python, script, models, *kinds]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    shutil.copytree(models / kind, folder, dirs_exist_ok=True)
    with np.load(folder / "run.npz") as file:
        arrays = {name: file[name] for name in file.files}
    return tuple(
        {name[len(side) :]: array for name, array in arrays.items() if name.startswith(side)}
        for side in ("in:", "out:")
    )  # type: ignore[return-value]


def agree(engine: Path, inputs: Arrays, expected: Arrays, error: float = FP32_ERROR) -> None:
    with tandem.open_session(engine) as session:
        assert {spec.name for spec in session.inputs} == set(inputs)
        outputs = session.infer(dict(inputs))
    assert set(outputs) == set(expected)
    for name, array in expected.items():
        assert np.abs(outputs[name] - array).max() <= error * np.abs(array).max(), name


@pytest.mark.parametrize(
    ("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)]
)
def test_without_tensorflow_these_tests_fail_in_ci_and_are_skipped_elsewhere(
    ci: str,
    outcome: type[BaseException],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "python"))
    with pytest.raises(outcome, match=r"makes \.venv-tensorflow"):
        request.getfixturevalue("tensorflow")


MODELS = (
    pytest.param("keras", "model.keras", FP32_ERROR, marks=pytest.mark.slow),
    ("saved_model", "saved_model", FP32_ERROR),
    ("tflite", "model.tflite", FP32_ERROR),
    # TensorFlow Lite rounds in integers, ONNX in floating point: some steps of the last scale.
    pytest.param("int8_tflite", "model.tflite", 0.05, marks=pytest.mark.slow),
)


@pytest.mark.parametrize(("kind", "name", "error"), MODELS)
def test_an_engine_computes_what_tensorflow_computes(
    kind: str,
    name: str,
    error: float,
    tensorflow: Path,  # noqa: F811
    models: Path,
    tmp_path: Path,
) -> None:
    inputs, expected = make(tensorflow, kind, models, tmp_path)
    engine, report = run_command_of_page(name, tmp_path)
    assert "exported to ONNX by TensorFlow 2" in report
    agree(engine, inputs, expected, error)


@pytest.mark.slow
def test_inputs_as_nchw_holds_in_build_plan_calibrate_and_compare(
    tensorflow: Path,  # noqa: F811
    models: Path,
    tmp_path: Path,
) -> None:
    inputs, expected = make(tensorflow, "h5", models, tmp_path)
    ((name, picture),) = inputs.items()
    turned = {name: np.ascontiguousarray(picture.transpose(0, 3, 1, 2))}
    agree(run_command_of_page("model.h5", tmp_path)[0], turned, expected)
    np.save(tmp_path / "x.npy", turned[name])
    model, data = str(tmp_path / "model.h5"), str(tmp_path / "x.npy")
    commands = (
        ["plan", model, "--profile", "agx-orin-64gb"],
        ["calibrate", model, "--data", data],
        ["compare", str(tmp_path / "model.engine"), "--model", model, "--data", data],
    )
    for command in commands:
        done = CliRunner().invoke(command_line, [*command, "--inputs-as-nchw"])
        assert done.exit_code == 0, (command, done.output, done.exception)


def test_an_operator_without_onnx_is_named_with_its_node(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="relu"),
        helper.make_node("SelfAdjointEigV2", ["r"], ["y"], name="eigenvalues"),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (3, 3)) for name in "xy")
    save(helper.make_model(helper.make_graph(nodes, "g", [x], [y])), tmp_path / "m.onnx")
    with pytest.raises(ValueError, match=r"no ONNX for .* SelfAdjointEigV2 .*'eigenvalues'"):
        tensorflow_export._refuse_foreign(str(tmp_path / "m.onnx"))


@pytest.mark.slow
def test_what_cannot_be_exported_is_named_and_the_log_is_kept(
    tensorflow: Path,  # noqa: F811
    models: Path,
    tmp_path: Path,
) -> None:
    make(tensorflow, "eigenvalues", models, tmp_path)
    with pytest.raises(
        tandem.TandemError, match=r"saved_model cannot be exported.*SelfAdjointEig.*log"
    ) as refused:
        tandem.build(tmp_path / "saved_model")
    log = Path(str(refused.value).rpartition(" is in ")[2].rstrip("."))
    assert "Eig" in log.read_text()
    log.unlink()
    assert not (tmp_path / "saved_model.engine").exists()


@pytest.mark.slow
def test_a_damaged_keras_file_is_refused(tensorflow: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "net.keras").write_bytes(b"PK")
    with pytest.raises(tandem.TandemError, match=r"net\.keras cannot be exported"):
        tandem.build(tmp_path / "net.keras")


def test_a_keras_that_runs_code_of_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"tensorflow": "", "tf2onnx": "", "keras": "__version__ = '3.11.3'"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "net.h5").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(VARIABLE, sys.executable)
    with pytest.raises(tandem.TandemError, match=r"Keras 3\.11\.3 can run code.*keras>=3\.12"):
        tandem.build(tmp_path / "net.h5")


def test_without_tensorflow_the_error_has_the_commands_that_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "net.tflite").touch()
    with pytest.raises(tandem.TandemError) as refused:
        tandem.build(tmp_path / "net.tflite")
    python = tmp_path / "tandem" / "tensorflow" / "bin" / "python"
    assert f"python3 -m venv {python.parent.parent}\n" in str(refused.value)
    assert f"{python} -m pip install {' '.join(REQUIREMENTS)}\n" in str(refused.value)


@pytest.mark.parametrize("program", ["python", "."])  # "." is a folder: that of the environment
def test_an_interpreter_that_does_not_exist_is_refused(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / program))
    (tmp_path / "net.tflite").touch()
    with pytest.raises(tandem.TandemError, match=f"{VARIABLE} is .* no program"):
        tandem.build(tmp_path / "net.tflite")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo no module named tensorflow", "no module named tensorflow"),  # on standard output
        ("echo broken >&2; exit 3", "broken"),
        ("exit 3", "exit status 3"),
        ("echo 7", "7"),  # JSON, but not ours
        ("kill -9 $$", "signal 9"),
    ],
)
def test_an_interpreter_that_does_not_work_is_named_with_what_it_says(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(python))
    (tmp_path / "net.tflite").touch()
    with pytest.raises(tandem.TandemError, match="cannot be exported") as refused:
        tandem.build(tmp_path / "net.tflite")
    assert message in str(refused.value)
    assert str(python) in str(refused.value)
    Path(str(refused.value).rpartition(" is in ")[2].rstrip(".")).unlink()


def test_a_file_that_is_no_program_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_bytes(b"\x7fELF is all")
    python.chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(python))
    (tmp_path / "net.tflite").touch()
    with pytest.raises(tandem.TandemError, match=f"{python} cannot be started.*{VARIABLE}"):
        tandem.build(tmp_path / "net.tflite")


@pytest.mark.parametrize("name", ["net.onnx", "net.pt2"])
def test_the_layout_of_other_formats_is_not_changed(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(tandem.TandemError, match=r"inputs_as_nchw=True\)` is for TensorFlow"):
        tandem.build(tandem.ModelPath(tmp_path / name, inputs_as_nchw=True))


def test_a_folder_without_a_saved_model_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(tandem.TandemError, match="folder without saved_model"):
        tandem.build(tmp_path, tmp_path / "net.engine")
    with pytest.raises(tandem.TandemError, match="check the path"):
        tandem.build(tmp_path / "missing.keras")


def test_the_working_directory_may_be_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert source_path(".") == tmp_path
    with pytest.raises(tandem.TandemError, match="so it is no SavedModel"):
        tandem.build(".")


def test_weights_without_a_network_are_refused(tmp_path: Path) -> None:
    (tmp_path / "net.safetensors").touch()
    with pytest.raises(tandem.TandemError, match="weights without a network"):
        tandem.build(tmp_path / "net.safetensors")


class Node:
    """What tf2onnx has of an operator."""

    type, name = "TFL_CUMSUM", "sums/out"


def converter(node: object) -> None:
    shapes: list[int] = []
    shapes[len(str(node))]


def parser(optype: str) -> None:
    raise KeyError(optype[:0] + "axis")


def library() -> None:
    list[int]()[1]


@pytest.mark.parametrize(
    ("fail", "says"),
    [
        (lambda: converter(Node()), "tf2onnx cannot convert the operator TFL_CUMSUM (node "
         "'sums/out') (IndexError: list index out of range)"),
        (lambda: parser("TFL_LSTM"), "cannot convert the operator TFL_LSTM (KeyError: 'axis')"),
        (library, "the file is damaged, or of a kind that library (test_import_tensorflow.py, "
         "line "),
    ],
)  # fmt: skip
def test_a_slip_of_the_converter_names_the_operator(fail: Any, says: str) -> None:
    """What it raises has often no word of the cause: "IndexError"."""
    with pytest.raises((IndexError, KeyError)) as caught:
        fail()
    assert says in tensorflow_export._reason(caught.value)


@pytest.mark.slow
def test_an_operator_of_a_tflite_that_is_not_converted_is_named(
    tensorflow: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    code = (
        "import sys, tensorflow as tf\n"
        "call = tf.function(tf.signal.rfft, input_signature=[tf.TensorSpec([1, 64], tf.float32)])\n"
        "make = tf.lite.TFLiteConverter.from_concrete_functions([call.get_concrete_function()])\n"
        "open(sys.argv[1], 'wb').write(make.convert())\n"
    )
    path = tmp_path / "sound.tflite"
    subprocess.run([tensorflow, "-c", code, path], check=True, capture_output=True)
    with pytest.raises(tandem.TandemError) as caught:
        tandem.plan(path, profile="orin-nano-8gb")
    assert "sound.tflite cannot be exported to ONNX" in str(caught.value)
    assert "cannot convert the operator RFFT2D (node '" in str(caught.value)
