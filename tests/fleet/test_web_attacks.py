"""A hostile client of the fleet's page, and a store that hangs: the others are served."""

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from fleet_server_fixtures import device_row, write_fleet
from postgresql_fixtures import postgresql
from web_fixtures import PASSWORD, Visitor, WebThread, add_people, web_thread

from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.store import accounts
from toolkit.fleet.store.devices import save_devices
from toolkit.fleet.web import app, connection, store_threads
from toolkit.fleet.web.access import COOKIE
from toolkit.fleet.web.pages import audit

PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_fleet(tmp_path_factory.mktemp("attacks") / "fleet", 1)
    with contextlib.closing(load_fleet(folder).open_store()) as database, database.write():
        save_devices(database, [device_row("cam-1")])
    add_people(folder)
    return folder


@pytest.fixture
def web(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebThread]:
    monkeypatch.setattr(connection, "REQUEST_S", 0.4)
    monkeypatch.setattr(connection, "SEND_S", 0.4)
    monkeypatch.setattr(store_threads, "WAIT_S", 0.4)
    with web_thread(folder) as web:
        yield web


@pytest.fixture
def person(folder: Path, web: WebThread) -> Visitor:
    """Somebody who has signed in, without a password, which takes time."""
    with contextlib.closing(load_fleet(folder).open_store()) as database:
        return Visitor(web, {COOKIE: accounts.open_session(database, "otto")})


# -- a store that hangs


def hang(name: str, place: object, monkeypatch: pytest.MonkeyPatch) -> Event:
    """Have a function of a module wait until the event is set."""
    end = Event()
    function: Callable[..., Any] = getattr(place, name)

    def hanging(*arguments: Any, **named: Any) -> Any:
        end.wait(PATIENCE_S)
        return function(*arguments, **named)

    monkeypatch.setattr(place, name, hanging)
    return end


def test_what_hangs_in_the_store_is_answered_and_other_pages_go_on(
    person: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = hang("_chain", audit, monkeypatch)
    try:
        answer = person.get("/audit")
        assert answer.status == 503
        assert "store has not answered within 0.4 s" in answer.text
        assert answer.headers["retry-after"]
        assert person.get("/devices").status == 200
    finally:
        end.set()


def test_a_write_that_waits_for_another_program_keeps_no_reader_waiting(
    person: Visitor, folder: Path
) -> None:
    with contextlib.closing(load_fleet(folder).open_store()) as database, database.write():
        answer = person.send("/devices/cam-1/labels", labels="site=lab")
        assert answer.status == 503
        assert "may still be done: look before it is sent again" in answer.text
        assert person.get("/devices/cam-1").status == 200
    until_s = time.monotonic() + PATIENCE_S  # the lock is free: it was done, and is said
    while "site=lab" not in person.get("/devices/cam-1").text:
        assert time.monotonic() < until_s


def test_when_the_whole_store_hangs_each_is_told_and_the_page_goes_on_after_it(
    person: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = hang("find_session", app, monkeypatch)
    for _ in range(store_threads.READERS + 2):
        assert person.get("/devices").status == 503
    assert Visitor(person.web).get("/static/style.css").status == 200
    end.set()
    until_s = time.monotonic() + PATIENCE_S
    while person.get("/devices").status != 200:
        assert time.monotonic() < until_s


def test_a_postgresql_that_stands_still_is_told_and_the_page_goes_on_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    psycopg = pytest.importorskip("psycopg")
    monkeypatch.setattr(store_threads, "WAIT_S", 1.0)
    with postgresql() as url:
        folder = write_fleet(tmp_path / "fleet", 1, store=url)
        with contextlib.closing(load_fleet(folder).open_store()) as database:
            accounts.add_account(database, "otto", "operator", PASSWORD)
            secret = accounts.open_session(database, "otto")
        with web_thread(folder) as web, psycopg.connect(url) as watcher:
            person = Visitor(web, {COOKIE: secret})
            assert person.get("/devices").status == 200
            backends = watcher.execute(
                "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
                " AND backend_type = 'client backend'"
            ).fetchall()
            for (pid,) in backends:
                os.kill(pid, signal.SIGSTOP)
            try:
                # Connections that are new may be answered, those that stand still are not.
                answers = [person.get("/devices").status for _ in range(store_threads.READERS + 1)]
                assert 503 in answers
                assert Visitor(web).get("/sign-in").status == 200
            finally:
                for (pid,) in backends:
                    os.kill(pid, signal.SIGCONT)
            until_s = time.monotonic() + PATIENCE_S
            while person.get("/devices").status != 200:
                assert time.monotonic() < until_s


# -- connections


class Line:
    """A connection that says what no client would."""

    def __init__(self, web: WebThread) -> None:
        self.socket = socket.create_connection(("127.0.0.1", web.port), timeout=PATIENCE_S)

    def say(self, text: str) -> None:
        self.socket.sendall(text.encode())

    def is_taken(self, text: str) -> bool:
        """Say a text again and again; whether the other side takes it for long."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            try:
                self.say(text)
            except OSError:
                return False
            time.sleep(0.05)
        return True

    def ended(self) -> bytes:
        """Return what comes until the other side ends it."""
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := self.socket.recv(65536):
                data += piece
        self.socket.close()
        return data


@pytest.mark.parametrize(
    "text",
    ["", "GET / HTTP/1.1\r\nhost: a\r\nx: ",
     "POST /sign-in HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\nname=",
     "GET /static/icon.svg HTTP/1.1\r\nhost: a\r\n\r\nGET / HT"],
)  # fmt: skip
def test_a_request_that_does_not_come_whole_is_not_waited_for(web: WebThread, text: str) -> None:
    line = Line(web)
    begun_s = time.monotonic()
    line.say(text)
    line.ended()
    assert time.monotonic() - begun_s < PATIENCE_S / 2


def test_a_request_that_trickles_is_not_waited_for(web: WebThread) -> None:
    line = Line(web)
    line.say("GET / HTTP/1.1\r\n")
    assert not line.is_taken("x: a\r\n")


def test_who_does_not_read_is_let_go(person: Visitor, web: WebThread) -> None:
    line = Line(web)
    line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    page = "GET /static/htmx.min.js HTTP/1.1\r\nhost: a\r\n\r\n"
    assert not line.is_taken(page * 100)
    assert person.get("/devices").status == 200


def test_the_site_stops_though_somebody_does_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "END_S", 0.4)
    with web_thread(folder) as web:
        line = Line(web)
        line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(10):  # 15 MB of answers, which no buffer of the kernel holds
            line.say("GET /static/htmx.min.js HTTP/1.1\r\nhost: a\r\n\r\n" * 40)
            time.sleep(0.05)
        begun_s = time.monotonic()
    assert time.monotonic() - begun_s < connection.SEND_S / 3
    line.socket.close()


def test_connections_of_one_address_are_few(monkeypatch: pytest.MonkeyPatch, web: WebThread
    ) -> None:  # fmt: skip
    monkeypatch.setattr(connection, "MAX_OF_ADDRESS", 3)
    monkeypatch.setattr(connection, "is_loopback", lambda _host: False)
    monkeypatch.setattr(connection, "REQUEST_S", PATIENCE_S)
    lines = [Line(web) for _ in range(3)]
    assert Line(web).ended() == b""
    for line in lines:
        line.say("GET /static/icon.svg HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert b"200" in line.ended()


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [("GET /" + "a" * 400_000, "", 400), ("GET /", "x: " + "a" * 400_000, 400),
     ("GET /", "".join(f"x{n}: a\r\n" for n in range(20_000)), 400),
     ("POST /sign-in", "content-length: 1\r\ntransfer-encoding: chunked", 400),
     ("POST /sign-in", "content-length: 1\r\ncontent-length: 2", 400),
     ("GET http://evil.example/", "", 404), ("GET /\x01", "", 400), ("BREW /", "", 405)],
)  # fmt: skip
def test_a_request_that_is_none_is_refused(
    web: WebThread, request_line: str, headers: str, status: int
) -> None:
    line = Line(web)
    with contextlib.suppress(OSError):
        line.say(f"{request_line} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{headers}\r\n\r\n")
    answer = line.ended()
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()) or not answer, answer[:200]


@pytest.mark.parametrize(
    ("path", "declared"), [("/sign-in", True), ("/orders", False), ("/api/v1/rollouts/plan", False)]
)
def test_a_body_that_is_too_large_is_not_read(
    person: Visitor, folder: Path, path: str, declared: bool
) -> None:
    with contextlib.closing(load_fleet(folder).open_store()) as database:
        token = accounts.add_token(database, "large", "operator", lifetime_s=60.0)
    size = 50 << 20
    length = f"content-length: {size}" if declared else "transfer-encoding: chunked"
    line = Line(person.web)  # type: ignore[arg-type]
    line.say(f"POST {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {token}\r\n"
        f"cookie: {COOKIE}={person.cookies[COOKIE]}\r\n{length}\r\n\r\n")  # fmt: skip
    piece = "a" * 65536 if declared else f"10000\r\n{'a' * 65536}\r\n"
    sent = 0
    with contextlib.suppress(OSError):
        while sent < size:
            line.say(piece)
            sent += len(piece)
    assert sent < size / 2 or b" 413 " in line.ended()


# -- paths, hosts, sessions


@pytest.mark.parametrize(
    "path",
    ["/static/../web/app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py",
     "/static//etc/passwd", "/static/%2fetc%2fpasswd", "/static/..%5capp.py",
     "/releases/..%2f..%2ffleet.toml", "/devices/..%2f..%2ffleet.toml"],
)  # fmt: skip
def test_no_path_leads_out_of_the_site(person: Visitor, path: str) -> None:
    answer = person.get(path)
    assert answer.status == 404
    assert "import" not in answer.text
    assert "tls = false" not in answer.text


@pytest.mark.parametrize("name", ["../fleet", "..%2ffleet.toml", "/etc/passwd", "\x00", "a" * 300])
def test_a_bundle_is_named_by_its_hash_alone(person: Visitor, folder: Path, name: str) -> None:
    with contextlib.closing(load_fleet(folder).open_store()) as database:
        token = accounts.add_token(database, "paths", "operator", lifetime_s=60.0)
    program = Visitor(person.web, headers={"authorization": f"Bearer {token}"})
    answer = program.ask("POST", "/api/v1/rollouts/plan", json.dumps({"bundle": name}))
    assert answer.status == 409
    assert "the fleet has no bundle" in answer.text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "a@b"])
def test_the_name_of_another_host_is_in_no_answer(person: Visitor, host: str) -> None:
    for path in ("/", "/nowhere"):
        answer = person.ask("GET", path, host=host)
        assert "evil.example" not in answer.text + str(answer.headers)
    stranger = Visitor(person.web).ask("GET", "/", host=host)
    assert stranger.headers["location"] == "/sign-in?back=%2F"


def test_a_session_that_somebody_brings_along_is_not_taken_over(web: WebThread) -> None:
    victim = Visitor(web, {COOKIE: "chosen-by-the-attacker"})
    assert victim.sign_in("vera", PASSWORD).status == 303
    assert victim.cookies[COOKIE] != "chosen-by-the-attacker"
    assert Visitor(web, {COOKIE: "chosen-by-the-attacker"}).get("/").status == 303


def test_no_form_leads_to_another_site(person: Visitor) -> None:
    assert Visitor(person.web).sign_in("vera", back="//evil.example").headers["location"] == "/"


@pytest.mark.parametrize(
    "path",
    [
        "/orders",
        "/rollouts",
        "/devices/cam-1/labels",
        "/devices/cam-1/commands",
        "/bulk/labels",
        "/devices/cam-1/decommission",
        "/devices/cam-1/enrol",
    ],
)
def test_no_form_is_taken_without_its_token(person: Visitor, path: str) -> None:
    answer = person.ask("POST", path, "labels=site%3Devil&order=pause:1&op=restart&count=cam-1")
    assert answer.status == 403
    assert "of another session" in answer.text


def test_a_refusal_does_not_mind_where_it_is_said_to_come_from(person: Visitor) -> None:
    answer = person.ask("POST", "/orders", "order=pause:1", referer="http://[")
    assert answer.status == 403
    assert "of another session" in answer.text


def test_streams_are_for_people_and_programs_that_have_signed_in(web: WebThread) -> None:
    for path in ("/live?page=/", "/api/v1/events"):
        assert Visitor(web).get(path).status == 401


# -- answers to programs


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/api/v1/nowhere", 404), ("DELETE", "/api/v1/fleet", 405), ("POST", "/api/v1/x", 404)],
)
def test_what_the_api_does_not_have_is_said_in_json(
    web: WebThread, method: str, path: str, status: int
) -> None:
    answer = Visitor(web).ask(method, path)
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(answer.text)["status"] == answer.status == status


def test_a_fault_of_the_site_is_said_and_not_told_in_detail(
    person: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_arguments: object) -> None:
        raise OSError("secret detail")

    monkeypatch.setattr(app, "find_session", fault)
    monkeypatch.setattr(app, "find_token", fault)
    for path, kind in (
        ("/devices", "text/html; charset=utf-8"),
        ("/api/v1/fleet", "application/json"),
    ):
        answer = person.get(path)
        assert (answer.status, answer.headers["content-type"]) == (500, kind)
        assert "the page has a fault here" in answer.text
        assert "secret" not in answer.text
        assert answer.headers["content-security-policy"]
