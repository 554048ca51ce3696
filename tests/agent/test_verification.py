"""The agent's side of a check: the child, its questions, its limits, and when it is asked again."""

import http.server
import io
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec
import pytest
from fleet_fixtures import Fleet
from mqtt_fixtures import DEVICE
from securesystemslib.signer import CryptoSigner
from tuf.api.exceptions import DownloadError, DownloadHTTPError, DownloadLengthMismatchError

from device.agent import verification as module
from device.agent.config import TrustTable
from device.agent.verification import (
    MetadataAsked,
    Verification,
    VerificationEnded,
    VerificationEvent,
)
from device.errors import TrustError
from device.install_advice import pip_install
from device.protocol.documents import (
    PipelineReport,
    Reported,
    TufGet,
    TufReply,
    Update,
    encode,
)
from device.protocol.signed import open_desired, open_reported, sign_document
from device.trust import fetchers
from device.trust.exchange import Line, Part, Refused, Trusted, Unverified, Verdict, encode_line
from device.trust.fetchers import FolderFetcher, HttpFetcher, RelayFetcher, WholeFileFetcher
from toolkit.fleet.server.metadata import MetadataServer

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return Fleet(tmp_path_factory.mktemp("fleet"))


class Checked:
    """A verification whose questions are answered from a fleet's folder."""

    def __init__(
        self, fleet: Fleet, folder: Path, command: tuple[str, ...] | None = None, **trust: object
    ) -> None:
        self.events: queue.Queue[VerificationEvent] = queue.Queue()
        self.paths: list[str] = []
        self.now_s = 0.0
        self._server = MetadataServer(fleet.served)
        self.verification = Verification(
            self.events.put,
            self._answer,
            device=DEVICE,
            trust=TrustTable(dir=str(fleet.trust), **trust),
            state_dir=folder,
            command=command or module._COMMAND,
        )

    def _answer(self, get: TufGet) -> None:
        self.paths.append(get.path)
        for number, part in enumerate(self._server.answer(get.path)):
            self.verification.on_reply(get.id, str(number), part)

    def check(self, document: bytes) -> Verdict:
        """Take a document and return the verdict of its child."""
        assert isinstance(self.verification.take(document, self.now_s), Unverified)
        assert self.verification.advance(self.now_s) is None
        return self.wait()

    def wait(self) -> Verdict:
        while True:
            verdict = self.verification.on_event(self.events.get(timeout=PATIENCE_S), self.now_s)
            if verdict is not None:
                return verdict


@pytest.fixture
def make(fleet: Fleet, tmp_path: Path) -> Iterator[Callable[..., Checked]]:
    checks: list[Checked] = []

    def make(command: tuple[str, ...] | None = None, **trust: object) -> Checked:
        checks.append(Checked(fleet, tmp_path, command, **trust))
        return checks[-1]

    yield make
    for one in checks:
        one.verification.stop()


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_the_child_asks_through_the_agent_and_ends_with_a_verdict(
    fleet: Fleet, make: Callable[..., Checked]
) -> None:
    checked = make()
    document = fleet.signed(fleet.desired(1))
    assert isinstance(checked.check(document), Trusted)
    assert checked.paths == [
        "metadata/2.root.json",
        "metadata/timestamp.json",
        "metadata/2.snapshot.json",
        "metadata/2.targets.json",
    ]
    # The same document again, as after each connection, is not checked again.
    assert isinstance(checked.verification.take(document, 1.0), Trusted)
    assert checked.verification.due_s is None


def test_a_folder_needs_no_server(fleet: Fleet, make: Callable[..., Checked]) -> None:
    checked = make(repository=str(fleet.served))
    assert isinstance(checked.check(fleet.signed(fleet.desired(1))), Trusted)
    assert checked.paths == []


def test_a_newer_document_ends_the_check_of_the_last_one(
    fleet: Fleet, make: Callable[..., Checked]
) -> None:
    checked = make()
    verification = checked.verification
    verification.take(fleet.signed(fleet.desired(1, device="board-2")), 0.0)
    verification.advance(0.0)
    checked.now_s = 1.0
    assert isinstance(checked.check(fleet.signed(fleet.desired(2))), Trusted)


HANGS = "import sys, time; sys.stdin.buffer.readline(); time.sleep(600)"
SAYS = "print('no JSON'); print('[' * 100000); import sys; sys.exit('the disk is gone')"


def test_a_child_that_ends_without_a_verdict_is_started_again_later(
    fleet: Fleet, make: Callable[..., Checked]
) -> None:
    checked = make(python(SAYS))
    verdict = checked.check(fleet.signed(fleet.desired(1)))
    assert isinstance(verdict, Unverified)
    assert verdict.reason.endswith("ended without a result: the disk is gone")
    pauses = []
    for _ in range(7):
        due_s = checked.verification.due_s
        assert due_s is not None
        pauses.append(due_s - checked.now_s)
        checked.now_s = due_s
        assert checked.verification.advance(due_s) is None
        checked.wait()
    assert pauses == [5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 3600.0]


def test_a_connection_or_the_document_again_ends_a_long_pause(
    fleet: Fleet, make: Callable[..., Checked]
) -> None:
    checked, document = make(python(SAYS)), fleet.signed(fleet.desired(1))
    verification = checked.verification
    checked.check(document)
    for again in (lambda: verification.look_again(1.0), lambda: verification.take(document, 1.0)):
        verification._due_s = 3600.0
        again()
        assert verification.due_s == 5.0  # after its last start
    verification.look_again(100.0)
    assert verification.due_s == 5.0


def test_a_flood_of_documents_starts_a_child_a_second(
    fleet: Fleet, make: Callable[..., Checked]
) -> None:
    verification = make(python(HANGS)).verification
    children = set()
    for number in range(100):
        now_s = number / 50
        verification.take(fleet.signed(fleet.desired(number)), now_s)
        assert verification.advance(now_s) is None
        children |= {verification._child} - {None}
    assert len(children) == 2


def test_a_child_that_hangs_is_killed(fleet: Fleet, make: Callable[..., Checked]) -> None:
    checked = make(python(HANGS), timeout_s=1.0)
    verification = checked.verification
    verification.take(fleet.signed(fleet.desired(1)), 0.0)
    assert verification.advance(0.0) is None
    child = verification._child
    assert child is not None
    assert verification.advance(1.0) is None
    verdict = verification.advance(1.0 + module.END_S)
    assert isinstance(verdict, Unverified)
    assert "took longer than 1 s" in verdict.reason
    assert not Path(f"/proc/{child.pid}").exists()


def test_checks_that_are_killed_leave_nothing_behind(
    fleet: Fleet, make: Callable[..., Checked]
) -> None:
    checked = make(repository=str(fleet.served))
    verification, folder = checked.verification, checked.verification._state_dir
    (folder / "metadata").mkdir(parents=True)
    for name in ("metadata/tmpabc", ".journal.json.0123.tmp"):  # as a kill leaves them
        (folder / name).write_bytes(b"half")
    for number in range(4):
        verification.take(fleet.signed(fleet.desired(number + 1)), 10.0 * number)
        verification.advance(10.0 * number)
        time.sleep(0.07 * number)
        verification.stop()
    checked.now_s = 100.0
    assert isinstance(checked.check(fleet.signed(fleet.desired(9))), Trusted)
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {
        "journal.json", "metadata/root.json", "metadata/root_history/1.root.json",
        "metadata/timestamp.json", "metadata/snapshot.json", "metadata/targets.json",
    }  # fmt: skip


def test_a_flood_of_answers_neither_blocks_nor_grows(
    fleet: Fleet, make: Callable[..., Checked]
) -> None:
    checked = make(python(HANGS))
    verification = checked.verification
    verification.take(fleet.signed(fleet.desired(1)), 0.0)
    verification.advance(0.0)
    for number in range(20_000):
        verification.on_reply("ab", str(number % 256), b"x" * 4096)
    for request, number in (("ab", "x"), ("ab", "-1"), ("ab", "256"), ("ab", "9" * 5000)):
        verification.on_reply(request, number, b"")
    assert verification._parts.qsize() <= module.MAX_WAITING_PARTS


def test_a_document_that_is_too_long_starts_no_child(
    fleet: Fleet, make: Callable[..., Checked]
) -> None:
    checked = make()
    verdict = checked.verification.take(b"x" * (64 * 1024 + 1), 0.0)
    assert isinstance(verdict, Refused)
    assert "has 65537 bytes, the limit is 65536" in verdict.reason
    assert checked.verification.due_s is None


def test_a_missing_package_is_named(fleet: Fleet, make: Callable[..., Checked]) -> None:
    code = (
        "import runpy, sys; sys.path.insert(0, sys.argv[1]); sys.modules['tuf'] = None;"
        "runpy.run_module('device.trust', run_name='__main__', alter_sys=True)"
    )
    checked = make((*python(code), str(Path(__file__).parents[2])))
    verdict = checked.check(fleet.signed(fleet.desired(1)))
    assert isinstance(verdict, Refused)
    assert "needs the package tuf" in verdict.reason
    assert pip_install("fleet") in verdict.reason


def test_the_agent_loads_no_library_of_a_check() -> None:
    code = (
        "import sys, device.agent.agent\n"
        "heavy = {'tuf', 'securesystemslib', 'cryptography', 'urllib3'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


# -- fetchers


class Pipes:
    """A relay fetcher with both ends of its pipes."""

    def __init__(self, deadline_s: float = float("inf")) -> None:
        outgoing, incoming = os.pipe(), os.pipe()
        self.questions: BinaryIO = os.fdopen(outgoing[0], "rb")
        self._answers: BinaryIO = os.fdopen(incoming[1], "wb")
        self.fetcher = RelayFetcher(
            os.fdopen(incoming[0], "rb"), os.fdopen(outgoing[1], "wb"), deadline_s
        )

    def question(self) -> TufGet:
        get = msgspec.json.decode(self.questions.readline(), type=Line).get
        assert get is not None
        return get

    def answer(self, request: str, number: int, parts: int, data: bytes, status: int = 200) -> None:
        payload = encode(TufReply(status=status, parts=parts)) + b"\n" + data
        part = Part(id=request, number=number, bytes=len(payload))
        self._answers.write(encode_line(part) + payload)
        self._answers.flush()

    def read(self, path: str) -> "queue.Queue[bytes | Exception]":
        results: queue.Queue[bytes | Exception] = queue.Queue()

        def run() -> None:
            try:
                results.put(b"".join(self.fetcher.fetch(path)))
            except Exception as error:  # noqa: BLE001  (whatever it is)
                results.put(error)

        threading.Thread(target=run, daemon=True).start()
        return results


def test_parts_may_come_twice_in_any_order_and_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetchers, "FIRST_WAIT_S", 0.05)
    pipes = Pipes()
    result = pipes.read("metadata/1.root.json")
    lost = pipes.question()
    pipes.answer(lost.id, 0, 2, b"lost")
    get = pipes.question()  # as the second part did not come
    monkeypatch.setattr(fetchers, "FIRST_WAIT_S", PATIENCE_S)
    while True:
        pipes.answer(lost.id, 1, 2, b"late")
        pipes.answer(get.id, 1, 2, b"two\n2")
        pipes.answer(get.id, 1, 2, b"two\n2")
        pipes.answer(get.id, 0, 2, b"one\n1")
        try:
            assert result.get(timeout=0.5) == b"one\n1two\n2"
            break
        except queue.Empty:  # it was too late for this question, too
            get = pipes.question()


def test_not_found_is_404_and_silence_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pipes = Pipes()
    result = pipes.read("metadata/9.root.json")
    pipes.answer(pipes.question().id, 0, 1, b"", status=404)
    error = result.get(timeout=PATIENCE_S)
    assert isinstance(error, DownloadHTTPError)
    assert error.status_code == 404
    silent = Pipes(deadline_s=0.0).read("metadata/timestamp.json").get(timeout=PATIENCE_S)
    assert isinstance(silent, DownloadError)
    assert "no server of the repository answered" in str(silent)


def test_an_answer_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetchers, "MAX_FILE_BYTES", 1000)
    pipes = Pipes()
    result = pipes.read("metadata/timestamp.json")
    get = pipes.question()
    for number in range(2):
        pipes.answer(get.id, number, 256, b"x" * 600)
    assert isinstance(result.get(timeout=PATIENCE_S), DownloadLengthMismatchError)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """A web server of a folder with one file."""
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata/timestamp.json").write_bytes(b"{}")
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("kind", ["web", "folder"])
def test_a_web_server_and_a_folder_answer_alike(
    kind: str, web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher: WholeFileFetcher = HttpFetcher(web) if kind == "web" else FolderFetcher(tmp_path)
    path = "metadata/timestamp.json"
    assert b"".join(fetcher.fetch(fetcher.base + path)) == b"{}"
    assert fetcher.last == path
    with pytest.raises(DownloadHTTPError) as missing:
        fetcher.fetch(f"{fetcher.base}metadata/2.root.json")
    assert missing.value.status_code == 404
    monkeypatch.setattr(fetchers, "MAX_FILE_BYTES", 1)
    with pytest.raises(DownloadLengthMismatchError):
        fetcher.fetch(fetcher.base + path)


def test_a_folder_is_not_left_and_a_web_server_may_be_away(tmp_path: Path) -> None:
    with pytest.raises(DownloadHTTPError):
        FolderFetcher(tmp_path).read("metadata/../../keys/root-1.pem")
    with pytest.raises(DownloadError) as away:
        HttpFetcher("http://127.0.0.1:1").read("metadata/timestamp.json")
    assert "127.0.0.1:1/metadata/timestamp.json" in str(away.value)


# -- the server's side


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("metadata/timestamp.json", 200),
        ("metadata/99.root.json", 404),
        ("metadata", 400),
        ("metadata/", 400),
        ("metadata/../../keys/root-1.pem", 400),
        ("keys/root-1.pem", 400),
        ("targets/../../keys/root-1.pem", 400),
        ("/etc/passwd", 400),
        ("metadata/a\nb", 400),
    ],
)
def test_the_server_answers_for_its_repository_alone(fleet: Fleet, path: str, status: int) -> None:
    (part,) = MetadataServer(fleet.served).answer(path)
    head, _, data = part.partition(b"\n")
    assert msgspec.json.decode(head, type=TufReply).status == status
    assert data == ((fleet.served / path).read_bytes() if status == 200 else b"")


def test_bundles_are_not_sent_as_metadata(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.fleet.server.metadata.MAX_TARGET_BYTES", 1000)
    bundle = next(fleet.served.rglob("*.bundle"))
    (part,) = MetadataServer(fleet.served).answer(bundle.relative_to(fleet.served).as_posix())
    assert msgspec.json.decode(part.partition(b"\n")[0], type=TufReply).status == 400


# -- documents that may be signed


def report() -> Reported:
    return Reported(
        agent="1",
        profile="p",
        dev=False,
        warning="",
        session=1,
        running=None,
        pipeline=PipelineReport(status="stopped"),
        update=Update(phase="idle"),
    )


def test_a_report_is_read_signed_or_not_and_only_signed_by_whom_knows_the_key() -> None:
    key, stranger = CryptoSigner.generate_ed25519(), CryptoSigner.generate_ed25519()
    signed, bare = sign_document(report(), [key]), encode(report())
    assert open_reported(signed) == open_reported(bare) == report()
    assert open_reported(signed, {key.public_key.keyid: key.public_key}) == report()
    for payload, public in ((bare, key.public_key), (signed, stranger.public_key)):
        with pytest.raises(TrustError, match="not signed by a key of the device"):
            open_reported(payload, {public.keyid: public})


@pytest.mark.parametrize(
    "payload", [b"", b"{", b"\xff", b'{"payload":"{}","signatures":[]}', b"[" * 100_000]
)
def test_what_is_no_document_is_a_value_error(payload: bytes) -> None:
    for read in (open_desired, open_reported):
        with pytest.raises(ValueError, match=r"."):
            read(payload)


def test_an_event_of_an_earlier_child_says_nothing(
    fleet: Fleet, make: Callable[..., Checked]
) -> None:
    verification = make().verification
    for event in (
        MetadataAsked(0, TufGet(id="ab", path="x")),
        VerificationEnded(0, Trusted()),
    ):
        assert verification.on_event(event, 0.0) is None


class Flood(io.BytesIO):
    """Parts without end, of a request that nobody made."""

    parts = 0

    def readline(self, _size: int | None = -1) -> bytes:
        self.parts += 1
        return encode_line(Part(id="00", number=0, bytes=4))

    def read(self, _size: int | None = -1) -> bytes:
        return b"junk"


def test_parts_that_nobody_asked_for_fill_no_memory() -> None:
    flood = Flood()
    RelayFetcher(flood, io.BytesIO(), time.monotonic() + 60.0)
    until = time.monotonic() + 30.0
    while flood.parts < fetchers.MAX_WAITING_PARTS:
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.2)
    assert flood.parts <= fetchers.MAX_WAITING_PARTS + 1
