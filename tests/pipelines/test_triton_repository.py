"""Repositories of Triton are written and read, and a batch of ensembles and formats is served."""

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
import tritonclient.http as triton_http
from cli_fixtures import output_of
from engine_fixtures import picture, single_network, write_network
from onnx import TensorProto, helper
from serving_fixtures import add_sub, served, value, write_onnx
from tritonclient.utils import InferenceServerException

from device.errors import ConfigError
from device.session import open_session
from pipelines.serving.model_config import as_json, parse_override, read_config
from pipelines.serving.protocol import from_bf16, to_bf16


def tensor(name: str, data: np.ndarray, kind: str = "FP32") -> Any:
    one = triton_http.InferInput(name, list(data.shape), kind)
    one.set_data_from_numpy(data)
    return one


def test_an_exported_engine_gives_the_same_and_is_batched(tmp_path: Path) -> None:
    engine = write_network(tmp_path / "net.engine", single_network("batch"))
    output_of("export", engine, "--to", "triton", "-o", tmp_path / "repository")
    folder = tmp_path / "repository" / "net"
    config = read_config(folder / "config.pbtxt")
    assert (config.max_batch_size, config.backend) == (4, "onnxruntime")
    assert list(config.input[0].dims) == [3, 16, 16]
    assert config.HasField("dynamic_batching")
    frame = picture(2)
    model = onnxruntime.InferenceSession(folder / "1" / "model.onnx")
    with open_session(engine) as session:
        expected = session.infer({"x": frame})["y"]
    assert np.allclose(model.run(None, {"x": frame})[0], expected, atol=1e-5)
    scripts = list((folder / "tensorrt").rglob("trtexec-*.sh"))
    assert scripts
    with served(tmp_path / "repository") as ports:
        client = triton_http.InferenceServerClient(f"127.0.0.1:{ports.http}")
        answer = client.infer("net", [tensor("x", frame)])
        assert np.allclose(answer.as_numpy("y"), expected, atol=1e-5)


def test_an_imported_repository_has_engines_and_keeps_what_cannot_be_built(tmp_path: Path) -> None:
    root = tmp_path / "theirs"
    add_sub(root, "simple", TensorProto.INT32)
    add_sub(root, "texts", TensorProto.STRING)
    (root / "plan" / "1").mkdir(parents=True)
    (root / "plan" / "1" / "model.plan").write_bytes(b"x")
    (root / "plan" / "config.pbtxt").write_text('platform: "tensorrt_plan"')
    text = output_of("import-triton", root, "--profile", "laptop", "-o", tmp_path / "ours")
    assert "simple version 1: model.engine" in text
    assert "texts version 1: model.onnx (not built, and `tandem build` says why" in text
    assert "plan version 1: left out (it has no model.onnx, but model.plan)" in text
    with served(tmp_path / "ours") as ports:
        client = triton_http.InferenceServerClient(f"127.0.0.1:{ports.http}")
        assert client.get_model_metadata("simple")["platform"] == "tandem_engine"
        rows = np.arange(48, dtype=np.int32).reshape(3, 16)
        inputs = [tensor(f"INPUT{i}", rows, "INT32") for i in (0, 1)]
        assert np.array_equal(client.infer("simple", inputs).as_numpy("OUTPUT0"), 2 * rows)
        with pytest.raises(InferenceServerException, match=r"no model\.engine and no model.onnx"):
            client.get_model_metadata("plan")


def scale(root: Path, name: str, factor: float, config: str) -> None:
    constant = helper.make_tensor("f", TensorProto.FLOAT, [], [factor])
    write_onnx(
        root / name / "1" / "model.onnx",
        [
            helper.make_node("Constant", [], ["f"], value=constant),
            helper.make_node("Mul", ["x", "f"], ["y"]),
        ],
        [value("x", TensorProto.FLOAT, [1, 4])],
        [value("y", TensorProto.FLOAT, [1, 4])],
    )  # fmt: skip
    (root / name / "config.pbtxt").write_text(config)


ENSEMBLE = """
platform: "ensemble"
input { name: "IN" data_type: TYPE_FP32 dims: [ 1, 4 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1, 4 ] }
ensemble_scheduling {
  step [
    {
      model_name: "second" model_version: -1
      input_map { key: "x" value: "between" } output_map { key: "y" value: "OUT" }
    },
    {
      model_name: "first" model_version: -1
      input_map { key: "x" value: "IN" } output_map { key: "y" value: "between" }
    }
  ]
}
"""


def test_steps_of_an_ensemble_pass_tensors_on(tmp_path: Path) -> None:
    scale(tmp_path, "first", 2.0, "")
    scale(tmp_path, "second", 5.0, "")
    (tmp_path / "both" / "1").mkdir(parents=True)
    (tmp_path / "both" / "config.pbtxt").write_text(ENSEMBLE)
    (tmp_path / "loop" / "1").mkdir(parents=True)
    (tmp_path / "loop" / "config.pbtxt").write_text(ENSEMBLE.replace('"first"', '"loop"'))
    with served(tmp_path) as ports:
        assert "has itself as a step" in ports.reasons["loop"]
        client = triton_http.InferenceServerClient(f"127.0.0.1:{ports.http}")
        data = np.array([[1, 2, 3, 4]], np.float32)
        assert np.array_equal(client.infer("both", [tensor("IN", data)]).as_numpy("OUT"), 10 * data)


def test_shapes_labels_and_bf16_are_those_of_the_configuration(tmp_path: Path) -> None:
    config = """
    input { name: "x" data_type: TYPE_BF16 dims: [ 2, 2 ] reshape { shape: [ 1, 4 ] } }
    output {
      name: "y" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 1, 4 ] }
      label_filename: "labels.txt"
    }
    """
    scale(tmp_path, "m", 2.0, config)
    (tmp_path / "m" / "labels.txt").write_text("a\nb\nc\nd\n")
    with served(tmp_path) as ports:
        client = triton_http.InferenceServerClient(f"127.0.0.1:{ports.http}")
        data = np.array([[1.5, -2.0], [3.0, 0.25]], np.float32)
        answer = client.infer("m", [tensor("x", data.astype(ml_dtypes.bfloat16), "BF16")])
        assert np.array_equal(answer.as_numpy("y"), 2 * data.reshape(4))
        requested = [triton_http.InferRequestedOutput("y", class_count=1)]
        answer = client.infer(
            "m", [tensor("x", data.astype(ml_dtypes.bfloat16), "BF16")], outputs=requested
        )
        assert list(answer.as_numpy("y")) == [b"6.000000:2:c"]


def test_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800001, 0xFF7FFFFF], np.uint32)
    halves = to_bf16(bits.view(np.float32))
    assert [hex(one) for one in halves] == ["0x3f80", "0x3f82", "0x3f81", "0x7fc0", "0xff80"]
    assert np.array_equal(to_bf16(from_bf16(halves)), halves)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("max_batch_size: 3", "its engine has no batch|takes batches up to 1"),
        ('input { name: "z" data_type: TYPE_FP32 dims: [ 4 ] }', "has 'z'; the engine has x"),
        ('input { name: "x" data_type: TYPE_INT8 dims: [ 1, 4 ] }', "is INT8 in its config"),
        ('input { name: "x" data_type: TYPE_FP32 dims: [ 1, 5 ] }', r"\[1, 5\] in its conf"),
        ('name: "other"', "its folder is 'm'"),
        ("nonsense: 3", "is no model configuration"),
        ("version_policy { specific { versions: [ 7 ] } }", "no version that its version_policy"),
    ],
)
def test_a_configuration_that_does_not_fit_says_why(
    tmp_path: Path, config: str, sentence: str
) -> None:
    scale(tmp_path, "m", 1.0, config)
    with served(tmp_path) as ports:
        assert re.search(sentence, ports.reasons["m"]), ports.reasons


def test_a_configuration_in_json(tmp_path: Path) -> None:
    assert parse_override('{"max_batch_size": "16", "input": [{"name": "x"}]}').max_batch_size == 16
    with pytest.raises(ConfigError):
        parse_override('"parameters": {}')
    row = as_json(parse_override('{"dynamic_batching": {"preferred_batch_size": [4]}}'))
    assert row["dynamic_batching"]["preferred_batch_size"] == [4]
    assert "sequence_batching" not in row
