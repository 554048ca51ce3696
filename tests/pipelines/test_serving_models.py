"""Models are loaded, exchanged and unloaded; requests are queued, batched and counted."""

import contextlib
import shutil
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm
from engine_fixtures import write_network
from onnx import TensorProto
from serving_fixtures import add_sub_network, identity, rows, served, write_repository
from tritonclient.utils import InferenceServerException

from device.engine.manifest import DimRange
from device.runtime.session import Session
from pipelines.serving.protocol import Refusal
from pipelines.serving.scheduler import Item, Policy, QueuePolicy, RequestQueue, Scheduler


@contextlib.contextmanager
def connected(port: int | None, library: Any = triton_http) -> Iterator[Any]:
    options = {"concurrency": 16} if library is triton_http else {}
    with library.InferenceServerClient(f"127.0.0.1:{port}", **options) as client:
        yield client


def pair(library: Any, first: np.ndarray, second: np.ndarray) -> list[Any]:
    inputs = [library.InferInput(f"INPUT{i}", list(first.shape), "INT32") for i in (0, 1)]
    inputs[0].set_data_from_numpy(first)
    inputs[1].set_data_from_numpy(second)
    return inputs


def with_config(root: Path, text: str, largest: int = 8) -> Path:
    folder = root / "simple"
    (folder / "1").mkdir(parents=True)
    write_network(folder / "1" / "model.engine", add_sub_network(largest))
    (folder / "config.pbtxt").write_text(text)
    return root


@pytest.mark.parametrize("library", [triton_http, triton_grpc])
def test_model_control_by_requests(tmp_path: Path, library: Any) -> None:
    with (
        served(write_repository(tmp_path), mode="explicit", load=("simple_string",)) as ports,
        connected(ports.http if library is triton_http else ports.grpc, library) as client,
    ):
        options = {} if library is triton_http else {"as_json": True}
        assert client.is_model_ready("simple_string")
        assert not client.is_model_ready("simple")
        with pytest.raises(InferenceServerException, match="is not found"):
            client.infer("simple", pair(library, rows(1), rows(1)))
        client.load_model("simple")
        assert client.is_model_ready("simple")
        with pytest.raises(InferenceServerException, match=r"failed to load 'simple'.*takes batch"):
            client.load_model("simple", config='{"max_batch_size": 9}')
        assert client.is_model_ready("simple")
        client.load_model("simple", config='{"max_batch_size": "2"}')
        config = client.get_model_config("simple", **options)
        assert config.get("config", config)["max_batch_size"] == 2
        client.unload_model("simple")
        assert not client.is_model_ready("simple")
        with pytest.raises(InferenceServerException, match="failed to load 'none'"):
            client.load_model("none")
        index = client.get_model_repository_index(**options)
        models = index if isinstance(index, list) else index["models"]
        states = {one["name"]: one.get("state", "") for one in models}
        assert (states["simple"], states["simple_string"]) == ("UNAVAILABLE", "READY")
        content = (tmp_path / "simple" / "1" / "model.engine").read_bytes()
        client.load_model("fresh", config="{}", files={"file:3/model.engine": content})
        assert client.is_model_ready("fresh", "3")


def test_requests_do_not_control_models_in_other_modes(tmp_path: Path) -> None:
    with served(write_repository(tmp_path)) as ports, connected(ports.http) as client:
        with pytest.raises(InferenceServerException, match="mode is 'none', not 'explicit'"):
            client.unload_model("simple")
        assert client.is_model_ready("simple")


def test_a_model_is_exchanged_without_a_lost_request(tmp_path: Path) -> None:
    root = with_config(tmp_path, 'name: "simple"')
    with served(root, mode="explicit", load=("*",)) as ports, connected(ports.http) as control:
        ended, answers = threading.Event(), []

        def ask() -> None:
            with connected(ports.http) as client:
                while not ended.is_set():
                    answer = client.infer("simple", pair(triton_http, rows(1), rows(1)))
                    answers.append(int(answer.as_numpy("OUTPUT0")[0, 15]))

        with ThreadPoolExecutor(4) as threads:
            asking = [threads.submit(ask) for _ in range(4)]
            for _ in range(5):
                control.load_model("simple")
            ended.set()
        for one in asking:
            one.result()
        assert len(answers) > 20
        assert set(answers) == {30}


def test_files_that_change_are_loaded_and_those_that_go_unloaded(tmp_path: Path) -> None:
    root = with_config(tmp_path, 'name: "simple"')

    def await_state(condition: Any) -> None:
        end_s = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end_s
            time.sleep(0.02)

    with served(root, mode="poll", poll_s=0.05) as ports, connected(ports.http) as client:
        assert client.get_model_metadata("simple")["versions"] == ["1"]
        identity(root, "other", TensorProto.FLOAT, ["n"])
        await_state(lambda: client.is_model_ready("other"))
        shutil.copytree(root / "simple" / "1", root / "simple" / "2")
        await_state(lambda: client.get_model_metadata("simple")["versions"] == ["2"])
        (root / "simple" / "config.pbtxt").write_text("damaged {")
        time.sleep(0.3)
        assert client.is_model_ready("simple", "2")
        shutil.rmtree(root / "other")
        await_state(lambda: not client.is_model_ready("other"))


def test_requests_of_64_clients_share_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    infer, submit = Session.infer, Scheduler.submit
    submitted: list[Item] = []
    all_wait = threading.Event()

    def counted(self: Scheduler, item: Item) -> None:
        submit(self, item)
        submitted.append(item)
        if len(submitted) == 64:
            all_wait.set()

    def held(self: Session, feeds: Any, outputs: Any = None) -> Any:
        if submitted:  # else it is the warm-up
            all_wait.wait()
        return infer(self, feeds, outputs)

    monkeypatch.setattr(Session, "infer", held)
    monkeypatch.setattr(Scheduler, "submit", counted)
    for name, batching in (("alone", ""), ("together", "dynamic_batching { }")):
        submitted.clear()
        all_wait.clear()
        root = with_config(tmp_path / name, f"max_batch_size: 8 {batching}")
        with (
            served(root) as ports,
            ThreadPoolExecutor(64) as threads,
            connected(ports.grpc, triton_grpc) as client,
        ):
            inputs = [pair(triton_grpc, rows(1, n), rows(1)) for n in range(64)]
            answers = list(threads.map(lambda one: client.infer("simple", one), inputs))
            for number, answer in enumerate(answers):
                assert np.array_equal(answer.as_numpy("OUTPUT0"), rows(1, number) + rows(1))
            stats = client.get_inference_statistics("simple", as_json=True)["model_stats"][0]
        assert int(stats["inference_count"]) == 64
        executions = int(stats["execution_count"])
        assert executions == 64 if name == "alone" else executions < 64 / 3


def test_a_batch_is_filled_up_to_one_that_the_engine_takes(tmp_path: Path) -> None:
    steps = DimRange(name="batch", min=4, opt=4, max=8, step=4)
    fixed = replace(add_sub_network(), dims=(steps,))
    (tmp_path / "simple" / "1").mkdir(parents=True)
    write_network(tmp_path / "simple" / "1" / "model.engine", fixed)
    (tmp_path / "simple" / "config.pbtxt").write_text("max_batch_size: 8")
    with served(tmp_path) as ports, connected(ports.http) as client:
        for count in (1, 4, 5):
            answer = client.infer("simple", pair(triton_http, rows(count), rows(count)))
            assert np.array_equal(answer.as_numpy("OUTPUT0"), 2 * rows(count))


def test_a_full_queue_and_a_timeout_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = "default_queue_policy { max_queue_size: 1 allow_timeout_override: true }"
    root = with_config(tmp_path, f"max_batch_size: 1 dynamic_batching {{ {policy} }}")
    with (
        served(root) as ports,
        ThreadPoolExecutor(1) as second,
        connected(ports.http) as client,
        connected(ports.grpc, triton_grpc) as busy,
    ):
        begun, go_on = threading.Event(), threading.Event()
        infer = Session.infer

        def wait(self: Session, feeds: Any, outputs: Any = None) -> Any:
            begun.set()
            go_on.wait()
            return infer(self, feeds, outputs)

        monkeypatch.setattr(Session, "infer", wait)
        inputs = pair(triton_http, rows(1), rows(1))
        running = second.submit(busy.infer, "simple", pair(triton_grpc, rows(1), rows(1)))
        begun.wait()
        with pytest.raises(InferenceServerException, match="request timeout expired: it wait"):
            client.infer("simple", inputs, timeout=1000)
        waiting = [client.async_infer("simple", inputs) for _ in range(2)]
        with pytest.raises(InferenceServerException, match="1 requests wait and 1 may") as refused:
            waiting[1].get_result()
        assert refused.value.status() == "503"
        go_on.set()
        running.result()
        waiting[0].get_result()


@pytest.mark.parametrize("library", [triton_http, triton_grpc])
def test_system_shared_memory(tmp_path: Path, library: Any) -> None:
    first, size = rows(1), 64
    handle = shm.create_shared_memory_region("both", "/tandem_test_both", 4 * size)
    try:
        with (
            served(write_repository(tmp_path)) as ports,
            connected(ports.http if library is triton_http else ports.grpc, library) as client,
        ):
            shm.set_shared_memory_region(handle, [first, first])
            client.register_system_shared_memory("both", "/tandem_test_both", 4 * size)
            with pytest.raises(InferenceServerException, match="registered already"):
                client.register_system_shared_memory("both", "/tandem_test_both", 4 * size)
            inputs = [library.InferInput(f"INPUT{i}", [1, 16], "INT32") for i in (0, 1)]
            outputs = [library.InferRequestedOutput(f"OUTPUT{i}") for i in (0, 1)]
            for number in (0, 1):
                inputs[number].set_shared_memory("both", size, offset=number * size)
                outputs[number].set_shared_memory("both", size, offset=(2 + number) * size)
            client.infer("simple", inputs, outputs=outputs)
            sums = shm.get_contents_as_numpy(handle, np.int32, [1, 16], offset=2 * size)
            assert np.array_equal(sums, 2 * first)
            inputs[0].set_shared_memory("both", size, offset=4 * size)
            with pytest.raises(InferenceServerException, match="has 256 bytes"):
                client.infer("simple", inputs)
            # A client may shrink what it has registered: that is no fault of the server.
            with Path("/dev/shm/tandem_test_both").open("r+b") as file:
                file.truncate(8)
            inputs[0] = library.InferInput("INPUT0", [1, 16], "INT32")
            inputs[0].set_shared_memory("both", size)
            with pytest.raises(InferenceServerException, match="has 8 bytes from offset 0"):
                client.infer("simple", inputs)
            assert len(client.get_system_shared_memory_status("both", **(
                {} if library is triton_http else {"as_json": True}
            ))) == 1  # fmt: skip
            client.unregister_system_shared_memory("both")
            with pytest.raises(InferenceServerException, match="Unable to find"):
                client.infer("simple", inputs)
            for key in ("/../etc/passwd", "no_such_region"):
                with pytest.raises(InferenceServerException, match="shared memory region 'x'"):
                    client.register_system_shared_memory("x", key, 8)
    finally:
        shm.destroy_shared_memory_region(handle)


def test_shared_memory_below_a_prefix(tmp_path: Path) -> None:
    with (
        served(write_repository(tmp_path), shared_memory_prefix="client_") as ports,
        connected(ports.http) as client,
        pytest.raises(InferenceServerException, match="begins with 'client_'"),
    ):
        client.register_system_shared_memory("x", "/other", 8)


def test_metrics_and_statistics_count_what_was_asked(tmp_path: Path) -> None:
    root = write_repository(tmp_path)
    with served(root, metrics_port=0) as ports, connected(ports.http) as client:
        for _ in range(3):
            client.infer("simple", pair(triton_http, rows(2), rows(2)))
        with pytest.raises(InferenceServerException):
            client.infer("simple", pair(triton_http, rows(9), rows(9)))
        address = f"http://127.0.0.1:{ports.metrics}/metrics"
        text = urllib.request.urlopen(address, timeout=5).read().decode()
        labels = 'model="simple",version="1"'
        assert f"nv_inference_request_success{{{labels}}} 3\n" in text
        assert f"nv_inference_count{{{labels}}} 6\n" in text
        assert f"nv_inference_exec_count{{{labels}}} 3\n" in text
        assert f'nv_inference_request_failure{{{labels},reason="OTHER"}} 1\n' in text
        assert "tandem_serve_http_connections " in text
        stats = client.get_inference_statistics("simple")["model_stats"][0]
        assert stats["inference_stats"]["success"]["count"] == 3
        assert stats["inference_stats"]["compute_infer"]["ns"] > 0
        assert [one["batch_size"] for one in stats["batch_stats"]] == [2]
        assert stats["last_inference"] > 0


def test_trace_and_log_settings(tmp_path: Path) -> None:
    with (
        served(write_repository(tmp_path)) as ports,
        connected(ports.http) as web,
        connected(ports.grpc, triton_grpc) as rpc,
    ):
        changed = {"trace_rate": "5", "trace_level": ["TIMESTAMPS"]}
        assert web.update_trace_settings("simple", changed)["trace_rate"] == "5"
        assert rpc.get_trace_settings("simple", as_json=True)["settings"]["trace_rate"] == {
            "value": ["5"]
        }
        assert web.get_trace_settings()["trace_rate"] == "1000"
        for default in (None, []):
            changed = web.update_trace_settings("simple", {"trace_rate": default})
            assert changed["trace_rate"] == "1000"
        rpc.update_log_settings({"log_verbose_level": 2, "log_info": False})
        assert web.get_log_settings()["log_verbose_level"] == 2
        with pytest.raises(InferenceServerException, match="'log_file' is not taken"):
            web.update_log_settings({"log_file": "/etc/passwd"})


def item(rows: int = 1, key: str = "", **options: Any) -> Item:
    return Item(None, rows, key, **options)


@pytest.mark.parametrize(
    ("policy", "instances", "results"),
    [(Policy("m"), 1, ["done"]), (Policy("m", max_batch=4), 1, ()), (Policy("m"), 2, ())],
)
def test_only_a_request_that_shares_nothing_runs_in_its_own_thread(
    policy: Policy, instances: int, results: Any
) -> None:
    scheduler = Scheduler(policy, [lambda items: ["done"]] * instances, lambda *_: None)
    try:
        assert scheduler.run_here(item()) == results
    finally:
        scheduler.close()


def test_a_request_in_its_own_thread_is_refused_as_in_the_queue() -> None:
    scheduler = Scheduler(Policy("m"), [lambda items: ["done"]], lambda *_: None)
    with pytest.raises(Refusal, match="priority 1 was asked for"):
        scheduler.run_here(item(level=1))
    scheduler.close()
    with pytest.raises(Refusal, match="'m' is being unloaded"):
        scheduler.run_here(item())


def test_a_batch_waits_for_its_delay_or_a_preferred_size() -> None:
    queue = RequestQueue(Policy("m", max_batch=8, preferred=(4,), delay_s=1.0))
    items = [item() for _ in range(5)]
    for number, one in enumerate(items[:3]):
        queue.put(one, number / 10)
    assert queue.take(0.3) == ([], 1.0)
    queue.put(items[3], 0.3)
    queue.put(items[4], 0.3)
    assert queue.take(0.3) == (items[:4], None)
    assert queue.take(0.3) == ([], 1.3)
    assert queue.take(1.3) == (items[4:], None)


def test_only_like_requests_share_a_batch_and_rows_are_not_exceeded() -> None:
    queue = RequestQueue(Policy("m", max_batch=8))
    first = [item(3), item(5), item(1), item(2, "other")]
    for one in first:
        queue.put(one, 0.0)
    assert [queue.take(0.0)[0] for _ in range(4)] == [first[:2], first[2:3], first[3:], []]


def test_priorities_go_first_and_have_queues_of_their_own() -> None:
    rows_of = {1: QueuePolicy(size=1)}
    queue = RequestQueue(Policy("m", levels=2, default_level=2, by_level=rows_of))
    late, early = item(), item(level=1)
    queue.put(late, 0.0)
    queue.put(early, 0.0)
    with pytest.raises(Refusal, match="1 requests wait and 1 may"):
        queue.put(item(level=1), 0.0)
    with pytest.raises(Refusal, match="priority 3 was asked for"):
        queue.put(item(level=3), 0.0)
    assert [queue.take(0.0)[0] for _ in range(2)] == [[early], [late]]


def test_what_waits_too_long_is_refused_or_goes_behind_the_others() -> None:
    refusing = RequestQueue(Policy("m", queue=QueuePolicy(timeout_s=1.0)))
    one, two = item(timeout_s=0.2), item()
    refusing.put(one, 0.0)
    refusing.put(two, 0.5)
    assert refusing.expire(0.1) == []
    assert refusing.expire(0.3) == [one]
    assert refusing.expire(1.4) == []
    assert refusing.expire(1.6) == [two]
    delaying = RequestQueue(Policy("m", queue=QueuePolicy(timeout_s=1.0, delays=True)))
    one, two = item(), item()
    delaying.put(one, 0.0)
    delaying.put(two, 0.5)
    assert delaying.expire(1.2) == []
    assert [delaying.take(1.2)[0] for _ in range(2)] == [[two], [one]]
