"""A program and a shell do with the API what docs/fleet_web.md says."""

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fleet_server_fixtures import device_row, report, write_fleet
from mqtt_fixtures import free_port, make_bundle
from web_fixtures import WebProcess, add_people

import tandem
from toolkit.errors import FleetError
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.server.operations import label_device
from toolkit.fleet.store.devices import save_devices
from toolkit.fleet.trust.publish import BENCH_BUNDLES

DOCS = (Path(__file__).parents[2] / "docs/fleet_web.md").read_text()
SERVED = "http://127.0.0.1:8080"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fleet of two devices, one of them a canary, that has the bundle 1.2."""
    work = tmp_path_factory.mktemp("client")
    folder = write_fleet(work / "fleet", 1)
    with closing(load_fleet(folder).open_store()) as database:
        with database.write():
            save_devices(database, [device_row(f"board-{n}", report("b")) for n in (1, 2)])
        label_device(database, "board-2", ["group=canary"], "otto")
    bundle = make_bundle(work / "in", version="1.2")
    (folder / BENCH_BUNDLES).mkdir()
    sha256 = hashlib.sha256(bundle.read_bytes()).hexdigest()
    shutil.copy(bundle, folder / BENCH_BUNDLES / f"{sha256}.bundle")
    return folder


@pytest.fixture(scope="module")
def token(folder: Path) -> str:
    return add_people(folder)


@pytest.fixture(scope="module")
def web(folder: Path, token: str) -> Iterator[WebProcess]:
    web = WebProcess(folder)
    yield web
    web.close()


def test_the_example_in_python_starts_a_rollout_and_follows_it(web: WebProcess, token: str) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    lines = []

    def print_first(*words: object) -> None:
        lines.append(words)
        raise StopIteration

    program = example.replace("https://fleet.example.com", web.url).replace(
        "fleet.events()", "fleet.events('0-0')"
    )
    names = {"token": token, "print": print_first}
    with pytest.raises(StopIteration):
        exec(program, names)
    assert lines[0][0] == "log"
    with tandem.fleet.Client(web.url, token) as fleet:
        assert names["devices"] == 2
        groups = fleet.rollout(int(str(names["number"])))["groups"]
    assert [(group["name"], group["devices"]) for group in groups] == [("canary", 1), ("rest", 1)]


def test_the_examples_with_curl_answer(web: WebProcess, folder: Path, tmp_path: Path) -> None:
    (example,) = re.findall(r"```bash\n(.*?)```", DOCS, re.DOTALL)
    assert example.count("curl") == example.count(SERVED) == 4
    tandem_command = tmp_path / "tandem"
    tandem_command.write_text(f'#!/bin/sh\nexec {sys.executable} -m toolkit.cli "$@"\n')
    tandem_command.chmod(0o700)
    shell = "set -e\n" + example.replace(SERVED, web.url).replace("curl", "echo; curl -f")
    done = subprocess.run(
        ["bash", "-c", shell], cwd=folder.parent, capture_output=True, text=True, check=False,
        env={
            **os.environ, "PYTHONPATH": os.pathsep.join(sys.path),
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counts, page, labels, document = (json.loads(line) for line in done.stdout.split("\n") if line)
    assert counts["devices"] == 2
    assert page == {"devices": [], "after": ""}
    assert labels["labels"]["site"] == "lab"
    assert document["openapi"].startswith("3.1")


def test_events_of_a_server_that_is_not_there_say_so() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with (
        tandem.fleet.Client(url, "token") as fleet,
        pytest.raises(FleetError, match=f"{url} cannot be reached"),
    ):
        next(fleet.events())


def test_events_that_break_off_say_so() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    head += b"transfer-encoding: chunked\r\n\r\n"
    event = b'id: 1\nevent: log\ndata: {"row": 1}\n\n'
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(head + b"%x\r\n%s\r\n" % (len(event), event) + b"40\r\nid: 2")

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with tandem.fleet.Client(url, "token") as fleet:
            events = fleet.events()
            assert next(events) == ("1", "log", {"row": 1})
            with pytest.raises(FleetError, match=f"{url} cannot be reached: .*Connection broken"):
                next(events)
        thread.join()


def test_a_page_in_place_of_an_answer_is_an_error_of_the_fleet(tmp_path: Path) -> None:
    (tmp_path / "api/v1").mkdir(parents=True)
    for name in ("fleet", "events"):
        (tmp_path / "api/v1" / name).write_text("<html>Log in</html>")
    pages = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), pages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            with (
                tandem.fleet.Client(url, "token") as fleet,
                pytest.raises(FleetError, match=f"{url} does not answer as"),
            ):
                fleet.counts()
            with (
                tandem.fleet.Client(url, "token") as fleet,
                pytest.raises(FleetError, match=f"{url} does not answer as"),
            ):
                next(fleet.events())
        finally:
            server.shutdown()
            thread.join()
