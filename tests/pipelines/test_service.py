"""A pipeline of kind "service": its table, and its program as a real process."""

import http.client
import os
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_fixtures import invoke
from service_fixtures import service_folder

from device.errors import ConfigError, PipelineError
from device.protocol.messages import ChildMessage, Heartbeat, Ready, Result
from pipelines.config import load_pipeline, parse_pipeline
from pipelines.open_models import bundle_files
from pipelines.service import problem_of, run_service
from toolkit.fleet.brokers.local import free_port

HEAD = 'name = "vlm"\nkind = "service"\n[service]\n'
URL = 'health_url = "http://127.0.0.1:8080/health"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + URL, "command"),
        (HEAD + 'command = ["a"]\n', "one of `health_url` and `health_command`"),
        (HEAD + 'command = ["a"]\nhealth_command = ["b"]\n' + URL, "one of `health_url` and"),
        (HEAD + 'command = ["a/../../b"]\n' + URL, "a file of the payload, or an absolute path"),
        (HEAD + 'command = ["a"]\nhealth_url = "http://10.0.0.1:80/"\n', "its own board"),
        (HEAD + 'command = ["a"]\nhealth_url = "http://127.0.0.1/health"\n', "its own board"),
        (HEAD + 'command = ["a"]\nfailures = 0\n' + URL, "failures"),
        ('name = "vlm"\nkind = "service"\n', "needs [service]"),
        ('batch = 2\n' + HEAD + 'command = ["a"]\n' + URL, "has no 'batch'"),
        ('name = "a"\n[source]\nuri = "0"\n[service]\ncommand = ["a"]\n' + URL,
         '[service] belongs to `kind = "service"`'),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_is_refused_by_its_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pipeline(text, Path("pipeline.toml"))
    assert message in str(caught.value)


def test_commands_for_engines_say_what_a_service_is(tmp_path: Path) -> None:
    folder = service_folder(tmp_path / "vlm", 8080)
    checked = invoke("pipeline", "check", folder / "pipeline.toml")
    assert checked.exit_code == 0, checked.output
    assert "'vlm' runs bin/llama-server 8080 good" in checked.output
    with pytest.raises(ConfigError, match="no engines and no frames"):
        bundle_files(load_pipeline(folder / "pipeline.toml"), folder)
    ran = invoke("run", folder / "pipeline.toml")
    assert "no engines and no frames" in str(ran.exception)


def run(folder: Path, until: Callable[[ChildMessage, threading.Event], None]) -> list[ChildMessage]:
    """Run a service in this process until the function has set the event."""
    messages: list[ChildMessage] = []
    stop = threading.Event()

    def emit(message: ChildMessage) -> None:
        messages.append(message)
        until(message, stop)

    run_service(load_pipeline(folder / "pipeline.toml"), folder, emit, stop)
    return messages


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return str(answer.read().decode())


def test_it_is_ready_once_healthy_and_ends_when_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    keys = 'cpus = 1\nenv = { MODEL = "model.gguf" }'
    folder = service_folder(tmp_path / "vlm", port, keys=keys)
    monkeypatch.setenv("TANDEM_MQTT_PASSWORD", "secret")
    answers = {}
    cores = os.sched_getaffinity(0)

    def until(message: ChildMessage, stop: threading.Event) -> None:
        if isinstance(message, Heartbeat) and message.frames >= 3:
            for path in ("/env", "/cores", "/v1/models"):
                answers[path] = get(port, path)
            stop.set()

    messages = run(folder, until)
    kinds = [type(message) for message in messages]
    first = next(m for m in messages if isinstance(m, Heartbeat))
    assert (first.state, first.frames) == ("starting", 0)
    assert kinds.index(Ready) + 1 == kinds.index(Result)
    last = messages[-1]
    assert isinstance(last, Heartbeat)
    assert last.errors == 0
    assert "MODEL" in answers["/env"].split()
    assert "TANDEM_MQTT_PASSWORD" not in answers["/env"]
    assert answers["/cores"] == "1"
    assert os.sched_getaffinity(0) == cores
    assert "double" in answers["/v1/models"]
    with pytest.raises(OSError, match="refused"):
        get(port, "/health")


def test_a_program_that_ends_or_is_never_healthy_ends_the_service(tmp_path: Path) -> None:
    def nothing(_message: ChildMessage, _stop: threading.Event) -> None:
        pass

    with pytest.raises(PipelineError, match="ended with status 1, its program"):
        run(service_folder(tmp_path / "dies", free_port(), "dies"), nothing)
    never = service_folder(tmp_path / "loads", free_port(), "loads", keys="start_s = 0.6")
    with pytest.raises(PipelineError, match=r"not healthy within 0.6 s \(start_s"):
        run(never, nothing)
    (tmp_path / "dies" / "payload" / "bin" / "llama-server").chmod(0o644)
    with pytest.raises(PipelineError, match="no program of the payload"):
        run(tmp_path / "dies", nothing)


def test_one_that_fails_its_checks_in_a_row_ends_with_the_reason(tmp_path: Path) -> None:
    port = free_port()
    folder = service_folder(tmp_path / "vlm", port, keys="failures = 2")

    def until(message: ChildMessage, _stop: threading.Event) -> None:
        if isinstance(message, Result):
            (folder / "payload" / "sick").touch()

    with pytest.raises(PipelineError, match=r"failed \d+ health checks in a row .*answers 503"):
        run(folder, until)


def test_one_that_holds_too_much_memory_is_ended(tmp_path: Path) -> None:
    port = free_port()
    folder = service_folder(tmp_path / "vlm", port, keys="memory_mb = 100")

    def until(message: ChildMessage, _stop: threading.Event) -> None:
        if isinstance(message, Result):
            try:
                get(port, "/hog")
            except (OSError, http.client.HTTPException):  # it was ended meanwhile
                return

    with pytest.raises(PipelineError, match=r"may hold 100 MiB \(memory_mb in \[service\]\)"):
        run(folder, until)


def test_the_health_of_another_process_at_its_port_is_not_its_own(tmp_path: Path) -> None:
    port = free_port()
    folder = service_folder(tmp_path / "vlm", port)

    def until(message: ChildMessage, stop: threading.Event) -> None:
        if isinstance(message, Result):
            with pytest.raises(PipelineError, match=f"another process listens on port {port}"):
                run(folder, lambda _message, _stop: None)
            stop.set()

    assert any(isinstance(message, Result) for message in run(folder, until))


def test_a_command_may_be_the_health_check(tmp_path: Path) -> None:
    folder = tmp_path / "vlm"
    (folder / "payload").mkdir(parents=True)
    (folder / "pipeline.toml").write_text(
        HEAD + 'command = ["/bin/sleep", "1000"]\n'
        'health_command = ["/bin/sh", "-c", "test -e healthy"]\ninterval_s = 0.1\n'
    )

    def until(message: ChildMessage, stop: threading.Event) -> None:
        if isinstance(message, Result):
            stop.set()
        elif isinstance(message, Heartbeat) and message.state == "starting":
            (folder / "payload" / "healthy").touch()

    assert any(isinstance(message, Result) for message in run(folder, until))


def test_a_health_check_that_takes_too_long_leaves_no_process(tmp_path: Path) -> None:
    payload = tmp_path / "payload"
    payload.mkdir()
    config = parse_pipeline(
        HEAD + 'command = ["a"]\nhealth_command = ["/bin/sh", "-c", '
        '"sleep 1000 & echo $! > child; wait"]\ntimeout_s = 2.0\n',
        tmp_path / "pipeline.toml",
    )
    assert config.service is not None
    assert "took longer than 2 s" in str(problem_of(config.service, payload))
    child = int((payload / "child").read_text())
    end_s = time.monotonic() + 60.0
    while is_running(child):
        assert time.monotonic() < end_s
        threading.Event().wait(0.05)


def is_running(process: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
