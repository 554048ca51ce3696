"""Releases of kind "service" on a board: a real agent behind mosquitto runs a foreign program."""

import contextlib
import http.client
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from board_fixtures import Board
from service_fixtures import service_bundle

from device.start.process_tree import process_rows
from toolkit.fleet.brokers.local import free_port

WAIT_S = 60.0


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Board]:
    board = Board(tmp_path / "board", tmp_path / "no-camera", "services = true")
    yield board
    board.close()


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT_S) as answer:
        return str(answer.read().decode())


def answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        return "double" in get(port, "/v1/models")
    return False


def wait_for(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s, f"never: {what}"
        threading.Event().wait(0.05)


def is_alive(pid: int) -> bool:
    row = process_rows().get(pid)
    return row is not None and row.state not in "ZX"


def test_a_healthy_service_becomes_live_and_a_sick_one_is_rolled_back(
    tmp_path: Path, services: Board
) -> None:
    port = free_port()
    result = services.deploy(service_bundle(tmp_path / "good", port, "parent"))
    assert result.live, (result, services.box.log())
    services.wait_status("running")
    child = int(get(port, "/child"))
    assert is_alive(child)

    keys = "start_s = 1.0"
    sick = service_bundle(tmp_path / "sick", port, "loads", keys=keys, version="2")
    result = services.deploy(sick)
    assert not result.live
    assert "was not healthy within 1 s (start_s in [service])" in result.reason
    wait_for(lambda: not is_alive(child), "the first program's tree ends")
    services.wait_status("running")
    assert "double" in get(port, "/v1/models")
    child = int(get(port, "/child"))
    assert services.box.terminate() == 0
    wait_for(lambda: not is_alive(child), "the tree ends with the agent")
    services.box.start()  # which sets the rights of its files
    wait_for(lambda: answers(port), "the service runs again")


def test_a_live_service_that_holds_too_much_is_ended_and_starts_again(
    tmp_path: Path, services: Board
) -> None:
    port = free_port()
    bundle = service_bundle(tmp_path / "good", port, keys="memory_mb = 100")
    result = services.deploy(bundle)
    assert result.live, (result, services.box.log())
    with contextlib.suppress(OSError, http.client.HTTPException):
        get(port, "/hog")
    report = services.wait_status("restarting")
    assert "may hold 100 MiB (memory_mb in [service])" in report.pipeline.reason
    services.wait_status("running")


def test_a_board_that_does_not_allow_services_goes_on_with_what_is_live(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", tmp_path / "no-camera")
    try:
        result = board.deploy(service_bundle(tmp_path / "good", free_port()))
        assert not result.live
        assert "vlm is a service, a program of another runtime" in result.reason
        assert board.processes("llama-server") == []
    finally:
        board.close()
