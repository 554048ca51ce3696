"""A hostile or damaged repository or request harms neither other files nor other models."""

import asyncio
import json
import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from serving_fixtures import identity, value, write_onnx

from device.errors import ConfigError
from pipelines.serving.instances import open_file
from pipelines.serving.protocol import InferRequest, Refusal, Status, Tensor
from pipelines.serving.queued_model import QueuedModel
from pipelines.serving.repository import LOADING, READY, Repository, Source, scan
from toolkit.engine.build import BuildOptions
from toolkit.triton_repository import import_triton


def explicit(root: Path) -> Repository:
    return Repository(partial(scan, root), "explicit")


def request(model: str, **arrays: Any) -> InferRequest:
    kinds = {"f": "FP32", "O": "BYTES"}
    inputs = [
        Tensor(name, kinds[array.dtype.kind], array.shape, array) for name, array in arrays.items()
    ]
    return InferRequest(model, "", inputs)


def folder(root: Path, name: str, config: str) -> None:
    (root / name / "1").mkdir(parents=True, exist_ok=True)
    (root / name / "config.pbtxt").write_text(config)


@pytest.mark.parametrize("name", ["", ".", "..", "{outside}", "a/b", "a\\b", "a\0b"])
def test_a_model_of_a_request_is_written_nowhere_else(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    models = explicit(tmp_path)
    change = models.load(name.format(outside=outside), "{}", {"1/model.onnx": b"x"})
    with pytest.raises(Refusal, match=r"name (cannot be empty|must not contain path traversal)"):
        asyncio.run(change)
    assert not outside.exists()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (" \t", "Model name cannot be empty. Please enter a valid name to deploy."),
        ("a/../b", "model name must not contain path traversal characters"),
        (".. ", "model name must not contain path traversal characters"),
        ("...", "it has no such model"),
    ],
)
def test_a_name_that_no_model_has_is_refused_as_triton_does(
    tmp_path: Path, name: str, sentence: str
) -> None:
    with pytest.raises(Refusal, match=re.escape(sentence)):
        asyncio.run(explicit(tmp_path).load(name))


def test_a_missing_input_beside_optional_ones_is_refused_as_triton_does(tmp_path: Path) -> None:
    identity(tmp_path, "step", TensorProto.FLOAT, [4])
    more = 'input { name: "MORE" data_type: TYPE_FP32 dims: [ 4 ] optional: true }'
    folder(tmp_path, "whole", ensemble("step") + more)
    with pytest.raises(Refusal, match="expected number of inputs between 1 and 2 but got 0 inputs"):
        infer(tmp_path, "whole", request("whole"))


def test_a_file_of_a_request_has_no_nul_in_its_name(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="is not VERSION/NAME"):
        asyncio.run(explicit(tmp_path).load("m", "{}", {"1/model\0.onnx": b"x"}))


def test_a_file_name_that_no_disk_takes_fails_the_load(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"failed to poll .*File name too long") as refusal:
        asyncio.run(explicit(tmp_path).load("m", "{}", {"A" * 256: b"x"}))
    assert refusal.value.status is Status.INTERNAL


@pytest.mark.parametrize("place", ["..", "/x", "a/x", "1/2/x", "1/..", "1/", "../x"])
def test_a_file_of_a_request_stays_in_its_model(tmp_path: Path, place: str) -> None:
    with pytest.raises(Refusal, match="is not VERSION/NAME or NAME"):
        asyncio.run(explicit(tmp_path).load("m", "{}", {place: b"x"}))


def test_a_request_brings_labels_beside_its_version(tmp_path: Path) -> None:
    identity(tmp_path / "other", "m", TensorProto.FLOAT, ["batch", 4])
    content = (tmp_path / "other" / "m" / "1" / "model.onnx").read_bytes()
    port = {"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": ["4"], "label_filename": "names"}
    config = json.dumps({"output": [port]})
    models = explicit(tmp_path)

    async def run() -> None:
        await models.load("m", config, {"1/model.onnx": content, "names": b"a\nb\nc\nd\n"})
        assert list(models.find("m").outputs["OUTPUT0"].labels) == ["a", "b", "c", "d"]
        await models.close()

    asyncio.run(run())


LABELS = 'output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "{}" }}'


@pytest.mark.parametrize("name", ["{outside}", "../outside.txt", "link"])
def test_labels_outside_of_the_model_are_not_read(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("secret")
    identity(tmp_path, "m", TensorProto.FLOAT, [4])
    (tmp_path / "m" / "link").symlink_to(outside)
    (tmp_path / "m" / "config.pbtxt").write_text(LABELS.format(name.format(outside=outside)))
    with pytest.raises(Refusal, match="is not inside"):
        asyncio.run(explicit(tmp_path).load("m"))


def test_a_default_file_outside_of_the_model_is_not_run(tmp_path: Path) -> None:
    identity(tmp_path, "other", TensorProto.FLOAT, [4])
    folder(tmp_path, "m", 'default_model_filename: "../../other/1/model.onnx"')
    with pytest.raises(Refusal, match="is not inside"):
        asyncio.run(explicit(tmp_path).load("m"))


def ensemble(step: str, *, kind: str = "FP32", optional: str = "false") -> str:
    return f"""
    platform: "ensemble"
    input {{ name: "IN" data_type: TYPE_FP32 dims: [ 4 ] optional: {optional} }}
    output {{ name: "OUT" data_type: TYPE_{kind} dims: [ 4 ] }}
    ensemble_scheduling {{ step [ {{ model_name: "{step}" model_version: -1
      input_map {{ key: "INPUT0" value: "IN" }} output_map {{ key: "OUTPUT0" value: "OUT" }} }} ] }}
    """


def infer(root: Path, name: str, inner: InferRequest) -> list[Tensor]:
    async def run() -> list[Tensor]:
        models = explicit(root)
        await models.load(name)
        try:
            return await asyncio.wait_for(models.find(name).infer(inner), 10)
        finally:
            await models.close()

    return asyncio.run(run())


def test_an_optional_input_of_an_ensemble_that_a_step_reads_is_asked_for(tmp_path: Path) -> None:
    identity(tmp_path, "step", TensorProto.FLOAT, [4])
    folder(tmp_path, "whole", ensemble("step", optional="true"))
    with pytest.raises(Refusal, match="'IN' is not given"):
        infer(tmp_path, "whole", request("whole"))


def test_an_output_of_an_ensemble_has_the_datatype_of_its_configuration(tmp_path: Path) -> None:
    identity(tmp_path, "step", TensorProto.FLOAT, [4])
    folder(tmp_path, "whole", ensemble("step", kind="FP64"))
    with pytest.raises(Refusal, match=r"is FP64 in its configuration.* gives FP32") as error:
        infer(tmp_path, "whole", request("whole", IN=np.zeros(4, np.float32)))
    assert error.value.status == Status.INTERNAL


def nonzero(root: Path) -> None:
    write_onnx(
        root / "m" / "1" / "model.onnx",
        [helper.make_node("NonZero", ["x"], ["n"]), helper.make_node("Transpose", ["n"], ["y"])],
        [value("x", TensorProto.FLOAT, ["N", 4])],
        [value("y", TensorProto.INT64, ["M", 2])],
    )


def test_dimensions_of_other_symbols_are_no_batch(tmp_path: Path) -> None:
    nonzero(tmp_path)
    (output,) = infer(tmp_path, "m", request("m", x=np.ones((2, 4), np.float32)))
    assert output.shape == (8, 2)


def test_an_output_that_is_no_batch_fails_and_is_not_cut(tmp_path: Path) -> None:
    nonzero(tmp_path)
    (tmp_path / "m" / "config.pbtxt").write_text("max_batch_size: 8")
    with pytest.raises(Refusal, match=r"has the shape \[8, 2\] for a batch of 2"):
        infer(tmp_path, "m", request("m", x=np.ones((2, 4), np.float32)))


def test_bytes_that_are_no_utf_8_fail_their_own_request(tmp_path: Path) -> None:
    identity(tmp_path, "m", TensorProto.STRING, ["batch", 1])
    (tmp_path / "m" / "config.pbtxt").write_text(
        "max_batch_size: 8\ndynamic_batching { preferred_batch_size: [ 2 ]"
        " max_queue_delay_microseconds: 200000 }"
    )

    async def run() -> list[Any]:
        models = explicit(tmp_path)
        await models.load("m")
        texts = (b"\xff", b"right", b"too")
        requests = [request("m", INPUT0=np.array([[one]], object)) for one in texts]
        model = models.find("m")
        results = await asyncio.gather(*map(model.infer, requests), return_exceptions=True)
        await models.close()
        return results

    bad, *good = asyncio.run(run())
    assert isinstance(bad, Refusal)
    assert "no UTF-8" in str(bad)
    assert [one[0].data.tolist() for one in good] == [[["right"]], [["too"]]]


def test_a_failed_load_closes_the_versions_that_it_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity(tmp_path, "m", TensorProto.FLOAT, [4])
    folder(tmp_path, "m", "version_policy { all { } }")
    (tmp_path / "m" / "2").mkdir()
    (tmp_path / "m" / "2" / "model.onnx").write_bytes(b"damaged")
    closed = []
    monkeypatch.setattr(QueuedModel, "close", lambda model: closed.append(model.version))
    with pytest.raises(Refusal, match="failed to load"):
        asyncio.run(explicit(tmp_path).load("m"))
    assert closed == [1]


def test_a_load_whose_client_goes_ends_and_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity(tmp_path, "m", TensorProto.FLOAT, [4])
    goes_on, closed = threading.Event(), []

    def slow(*words: Any) -> Any:
        assert goes_on.wait(10)
        return open_file(*words)

    close = QueuedModel.close

    def noted_close(model: QueuedModel) -> None:
        closed.append(model.name)
        close(model)

    monkeypatch.setattr("pipelines.serving.repository.open_file", slow)
    monkeypatch.setattr(QueuedModel, "close", noted_close)

    async def state(models: Repository) -> str:
        return next((row["state"] for row in await models.index() if row["name"] == "m"), "")

    async def run() -> None:
        models = explicit(tmp_path)
        load = asyncio.create_task(models.load("m"))
        while await state(models) != LOADING:
            await asyncio.sleep(0.01)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        goes_on.set()
        for _ in range(500):
            if await state(models) == READY:
                break
            await asyncio.sleep(0.01)
        assert await state(models) == READY
        await models.close()

    asyncio.run(run())
    assert closed == ["m"]


def test_an_entry_that_cannot_be_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    identity(tmp_path, "bad", TensorProto.FLOAT, [4])
    identity(tmp_path, "good", TensorProto.FLOAT, [4])
    iterdir = Path.iterdir

    def refused(path: Path) -> Any:
        if path.name == "bad":
            raise PermissionError(13, "Permission denied")
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", refused)
    assert list(scan(tmp_path)) == ["good"]
    assert "bad is left out" in caplog.text


def test_the_folder_is_looked_at_beside_the_event_loop(tmp_path: Path) -> None:
    threads = set()

    def look() -> dict[str, Source]:
        threads.add(threading.current_thread())
        return scan(tmp_path)

    async def run() -> None:
        models = Repository(look, "explicit")
        assert await models.index() == []
        await models.load_all(["*"])
        with pytest.raises(Refusal, match="no such model"):
            await models.load("m")
        await models._look_again({})
        assert threads
        assert threading.current_thread() not in threads

    asyncio.run(run())


def test_polling_goes_on_after_any_error(tmp_path: Path) -> None:
    identity(tmp_path, "m", TensorProto.FLOAT, [4])
    errors = [OSError(5, "Input/output error"), RuntimeError("other")]

    def failing() -> Any:
        if errors:
            raise errors.pop()
        return scan(tmp_path)

    async def run() -> None:
        models = Repository(failing, "poll")
        task = asyncio.create_task(models.poll(0.01))
        for _ in range(1000):
            if models.versions("m") or task.done():
                break
            await asyncio.sleep(0.01)
        assert models.versions("m") == [1]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await models.close()

    asyncio.run(run())


def as_override(step: str) -> str:
    return f"""{{"platform": "ensemble",
      "input": [{{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [4]}}],
      "output": [{{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [4]}}],
      "ensemble_scheduling": {{"step": [{{"model_name": "{step}", "model_version": -1,
        "input_map": {{"INPUT0": "INPUT0"}}, "output_map": {{"OUTPUT0": "OUTPUT0"}}}}]}}}}"""


def test_configurations_of_requests_make_no_cycle(tmp_path: Path) -> None:
    identity(tmp_path, "a", TensorProto.FLOAT, [4])
    identity(tmp_path, "b", TensorProto.FLOAT, [4])

    async def run() -> None:
        models = explicit(tmp_path)
        await models.load("a", as_override("b"))
        with pytest.raises(Refusal, match="has itself as a step"):
            await models.load("b", as_override("a"))
        await models.close()
        both = [models.load("a", as_override("b")), models.load("b", as_override("a"))]
        results = await asyncio.wait_for(asyncio.gather(*both, return_exceptions=True), 10)
        assert "has itself as a step" in str(results)
        await models.close()

    asyncio.run(run())


def imported(root: Path, output: Path) -> list[Any]:
    return import_triton(root, output, "laptop", BuildOptions())


def test_labels_of_an_import_stay_inside_of_it(tmp_path: Path) -> None:
    root = tmp_path / "theirs"
    identity(root, "m", TensorProto.STRING, [4])
    folder(root, "m", LABELS.format("texts/labels.txt").replace("FP32", "STRING"))
    (root / "m" / "texts").mkdir()
    (root / "m" / "texts" / "labels.txt").write_text("a")
    imported(root, tmp_path / "ours")
    assert (tmp_path / "ours" / "m" / "texts" / "labels.txt").read_text() == "a"
    (tmp_path / "evil.txt").write_text("b")
    folder(root, "m", LABELS.format("../../evil.txt").replace("FP32", "STRING"))
    with pytest.raises(ConfigError, match="is not inside"):
        imported(root, tmp_path / "deep" / "ours")
    assert not (tmp_path / "deep" / "evil.txt").exists()


def test_a_damaged_model_is_kept_with_a_note(tmp_path: Path) -> None:
    folder(tmp_path / "theirs", "m", "")
    (tmp_path / "theirs" / "m" / "1" / "model.onnx").write_bytes(b"\xff" * 100)
    (row,) = imported(tmp_path / "theirs", tmp_path / "ours")
    assert (row.file, "not a complete ONNX file" in row.note) == ("model.onnx", True)


def test_weights_of_any_name_are_kept_beside_their_model(tmp_path: Path) -> None:
    path = tmp_path / "theirs" / "m" / "1" / "model.onnx"
    write_onnx(
        path,
        [
            helper.make_node("Add", ["x", "w"], ["s"]),
            helper.make_node("Cast", ["s"], ["y"], to=TensorProto.STRING),
        ],
        [value("x", TensorProto.FLOAT, [1024]), value("w", TensorProto.FLOAT, [1024])],
        [value("y", TensorProto.STRING, [1024])],
    )
    model = onnx.load(path)
    del model.graph.input[1]
    model.graph.initializer.append(numpy_helper.from_array(np.ones(1024, np.float32), "w"))
    onnx.save(model, path, save_as_external_data=True, location="weights.bin")
    (row,) = imported(tmp_path / "theirs", tmp_path / "ours")
    assert row.file == "model.onnx"
    assert (tmp_path / "ours" / "m" / "1" / "weights.bin").stat().st_size == 4096
