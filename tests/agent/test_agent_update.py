"""A release of the agent that a fleet asks for: what is decided, and how it comes to its trial."""

import queue
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from control_fixtures import desired_of
from mqtt_fixtures import WAIT_S
from self_update_fixtures import HANGS, SIGNED, packed

from device.agent.agent import Agent
from device.agent.agent_trial import AgentTrial
from device.agent.agent_update import AgentUpdate, VersionInstalled
from device.agent.config import AgentConfig
from device.agent.launch import ENVIRONMENT
from device.files import sha256_of
from device.protocol.documents import BlobSpec, Desired, InstallPolicy, ReleaseSpec, Update
from device.trust.exchange import TRUSTED, Refused, Unverified, Verdict
from device.update import agent_versions as av
from device.update.agent_decisions import decide_agent
from device.update.agent_versions import AgentVersions
from device.update.sources.reader import SourceEvent

BLOB = BlobSpec(sha256="b" * 64, bytes=9, chunk_bytes=65536, index_sha256="c" * 64)
DESIRED = Desired(
    format=2, request="r2", release=ReleaseSpec(name="n", version="2", profile="agent", blob=BLOB)
)
TWO = "2-bbbbbbbbbbbb"
LEAVE = msgspec.structs.replace(DESIRED, leave=True)
AGAIN = msgspec.structs.replace(DESIRED, retry=True)
ODD = msgspec.structs.replace(
    DESIRED, release=msgspec.structs.replace(DESIRED.release, version="../../x")
)
FAILED = AgentVersions(failed=TWO, reason="it hung", request="r1")

# desired, verdict, versions, what runs; the word, a part of the reason
DECISIONS: list[tuple[Desired, Verdict, AgentVersions, str, str, str]] = [
    (DESIRED, TRUSTED, AgentVersions(), "", "fetch", ""),
    (DESIRED, TRUSTED, AgentVersions(staged=TWO), "", "try", ""),
    (DESIRED, TRUSTED, AgentVersions(staged="3-x"), "", "fetch", ""),
    (DESIRED, Refused(reason="forged"), AgentVersions(), "", "refused", "forged"),
    (DESIRED, Unverified(reason="wait"), AgentVersions(), "", "verifying", "wait"),
    (DESIRED, TRUSTED, AgentVersions(trial=TWO, starts=1), TWO, "trial", ""),
    (DESIRED, TRUSTED, AgentVersions(trial="3-x", starts=1), "3-x", "postponed", "3-x"),
    (DESIRED, Unverified(), AgentVersions(current=TWO), TWO, "live", ""),
    (DESIRED, TRUSTED, AgentVersions(current=TWO), "", "rolled_back", "version installed runs"),
    (AGAIN, TRUSTED, AgentVersions(current=TWO), "", "fetch", ""),
    (AGAIN, Unverified(), AgentVersions(current=TWO), TWO, "live", ""),
    (ODD, TRUSTED, AgentVersions(), "", "refused", "the version '../../x' is no file name"),
    (LEAVE, Unverified(reason="wait"), AgentVersions(current=TWO), TWO, "verifying", "wait"),
    (LEAVE, TRUSTED, AgentVersions(current=TWO), TWO, "leave", ""),
    (LEAVE, TRUSTED, AgentVersions(current="1-x"), TWO, "trial", "starts again, as the version b"),
    (LEAVE, TRUSTED, AgentVersions(current="1-x", previous="0-x"), "1-x", "live", ""),
    (DESIRED, TRUSTED, FAILED, "", "rolled_back", "was given up before: it hung"),
    (AGAIN, TRUSTED, FAILED, "", "fetch", ""),
    (AGAIN, TRUSTED, msgspec.structs.replace(FAILED, request="r2"), "", "rolled_back", "it hung"),
    (DESIRED, TRUSTED, av.refuse(FAILED, TWO, "r1", "no room"), "", "fetch", ""),
    (DESIRED, TRUSTED, av.refuse(FAILED, TWO, "r2", "no room"), "", "refused", "no room"),
    (
        msgspec.structs.replace(DESIRED, format=9), TRUSTED, AgentVersions(), "", "refused",
        "has format 9",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("desired", "verdict", "versions", "running", "word", "reason"), DECISIONS)
def test_what_becomes_of_a_release(
    desired: Desired, verdict: Verdict, versions: AgentVersions, running: str, word: str,
    reason: str,
) -> None:  # fmt: skip
    decision = decide_agent(desired, verdict, versions, running, lambda name: name == TWO)
    assert decision.word == word
    assert reason in decision.reason


class Bench:
    """An update without an agent: its events are taken from a queue, its source is a folder."""

    def __init__(
        self, folder: Path, running: str = "", source: str = "", *, dev: bool = True
    ) -> None:
        self.state_dir = folder / "state"
        self.state_dir.mkdir(exist_ok=True)
        config = {
            "device": "d", "profile": "p", "state_dir": str(self.state_dir), "dev": dev,
            "broker": {"host": "127.0.0.1"}, "update": {"sources": [source or str(folder)]},
        }  # fmt: skip
        self.events: queue.Queue[VersionInstalled | SourceEvent] = queue.Queue()
        self.hour = 12
        self.trial = AgentTrial(self.state_dir, {ENVIRONMENT: running} if running else {})
        self.update = AgentUpdate(
            msgspec.convert(config, AgentConfig), self.trial, self.events.put,
            lambda: time.struct_time((2026, 1, 1, self.hour, 0, 0, 0, 1, 0)),
        )  # fmt: skip

    def advance(self, *, busy: bool = False) -> bool:
        now_s = time.monotonic()
        self.update.next_request(now_s, online=False)
        return self.update.advance(now_s, busy=busy, mqtt=True, pipeline=False)

    def until(self, condition: Callable[[], bool], *, busy: bool = False) -> None:
        """Take events until something is so."""
        end_s = time.monotonic() + 6 * WAIT_S
        while not condition():
            assert time.monotonic() < end_s, self.reported
            assert not self.advance(busy=busy)
            try:
                event = self.events.get(timeout=0.1)
            except queue.Empty:
                continue
            if isinstance(event, VersionInstalled):
                self.update.on_installed(event)
            else:
                assert self.update.on_source(event, time.monotonic())

    @property
    def reported(self) -> Update:
        update = self.update.update
        assert update is not None
        return update

    @property
    def phase(self) -> str:
        return self.reported.phase


def release_in(
    folder: Path, code: str = "def agent(): ...", version: str = "2.0", **changes: object
) -> Desired:
    """A release in a folder that is a source of bundles, and the document that asks for it."""
    return offered(folder, packed(folder, version, code), **changes)


def offered(folder: Path, bundle: Path, **changes: object) -> Desired:
    """Name a bundle as sources have it; return the document that asks for it."""
    desired = desired_of(bundle, **changes)
    bundle.rename(folder / f"{sha256_of(bundle)}.bundle")
    return desired


def test_a_release_is_fetched_and_made_an_environment_and_tried_in_its_window(
    tmp_path: Path,
) -> None:
    policy = InstallPolicy(not_before="02:00", not_after="04:00")
    desired = release_in(tmp_path, policy=policy)
    bench = Bench(tmp_path)
    bench.update.on_desired(desired, TRUSTED)
    bench.until(lambda: bench.reported.phase == "postponed", busy=True)
    assert "a release is on trial" in bench.reported.reason
    bench.until(lambda: "maintenance window" in bench.reported.reason)
    bench.hour = 3
    assert bench.advance()
    name = av.environment_name("2.0", desired.release.blob.sha256)
    noted = av.read_versions(bench.state_dir)
    assert (noted.trial, noted.needs_mqtt, noted.needs_pipeline) == (name, True, False)
    assert noted.request == desired.request
    assert (bench.reported.phase, bench.reported.request) == ("trial", desired.request)
    assert bench.update.report.trial == name
    assert not bench.advance()  # once is enough

    av.write_versions(bench.state_dir, av.at_start(noted, lambda _one: True)[0])
    new = Bench(tmp_path, name)  # the agent of the new version
    new.update.on_desired(desired, TRUSTED)
    assert new.phase == "trial"
    new.trial.advance(0.0, mqtt=True, pipeline=False)
    assert not new.advance()
    assert new.phase == "live"
    new.update.on_desired(msgspec.structs.replace(desired, leave=True, request="u"), TRUSTED)
    new.hour = 3
    assert new.advance()
    assert not new.advance()
    assert (new.reported.phase, new.reported.request) == ("trial", "u")  # it still runs
    assert av.read_versions(new.state_dir) == AgentVersions(request=desired.request)

    old = Bench(tmp_path)
    old.update.on_desired(msgspec.structs.replace(desired, leave=True, request="u"), TRUSTED)
    assert (old.reported.phase, old.reported.request) == ("live", "u")


def waiting(bench: Bench, desired: Desired) -> Path:
    """The environment of a release that is installed and waits for its window."""
    bench.update.on_desired(desired, TRUSTED)
    bench.until(lambda: "maintenance window" in bench.reported.reason)
    folder = bench.state_dir / av.FOLDER
    return folder / av.environment_name(desired.release.version, desired.release.blob.sha256)


NIGHT = InstallPolicy(not_before="02:00", not_after="04:00")


def test_what_is_installed_is_fetched_once(tmp_path: Path) -> None:
    desired = release_in(tmp_path, policy=NIGHT)
    bench = Bench(tmp_path)
    environment = waiting(bench, desired)
    for bundle in tmp_path.glob("*.bundle"):
        bundle.unlink()  # it cannot be fetched again
    renewed = msgspec.structs.replace(desired, counter=2)
    for each in (bench, Bench(tmp_path)):  # the second one is the agent after a restart
        each.update.on_desired(renewed, Unverified(reason="it is checked"))
        each.hour = 3
        assert not each.advance()
        assert (each.reported.phase, each.reported.reason) == ("verifying", "it is checked")
        each.hour = 12
        each.update.on_desired(renewed, TRUSTED)
        assert not each.advance()
        assert each.reported.phase == "postponed"
        assert "maintenance window" in each.reported.reason
    each.hour = 3
    assert each.advance()
    assert av.read_versions(bench.state_dir).trial == environment.name


def test_an_installation_goes_on_while_a_renewed_document_is_checked(tmp_path: Path) -> None:
    desired = release_in(tmp_path, policy=NIGHT)
    bench = Bench(tmp_path)
    bench.update.on_desired(desired, TRUSTED)
    bench.until(lambda: bench.reported.phase == "staging")
    bench.update.on_desired(desired, Unverified())
    assert bench.phase == "verifying"
    bench.update.on_desired(desired, TRUSTED)
    assert bench.phase == "staging"
    bench.until(lambda: bench.reported.phase == "postponed")


def test_a_superseded_release_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    first = release_in(tmp_path, policy=NIGHT)
    second = msgspec.structs.replace(release_in(tmp_path, version="3.0"), policy=NIGHT)
    bench = Bench(tmp_path)
    one, download = waiting(bench, first), bench.state_dir / "agent-download"
    bench.update.on_desired(second, Unverified())
    assert one.exists()  # whoever wrote that document
    two = waiting(bench, second)
    assert (one.exists(), two.exists(), download.exists()) == (False, True, False)
    again = Bench(tmp_path)  # the agent was started again
    again.update.on_desired(None, Refused(reason="forged"))
    assert two.exists()
    again.update.on_desired(None, TRUSTED)
    assert not two.exists()

    again.update.on_desired(first, TRUSTED)
    again.until(lambda: again.reported.phase == "staging")
    assert [path.suffix for path in download.iterdir()] != []
    again.update.on_desired(msgspec.structs.replace(first, leave=True, request="u"), TRUSTED)
    assert not download.exists()
    event = again.events.get(timeout=6 * WAIT_S)
    while not isinstance(event, VersionInstalled):
        event = again.events.get(timeout=6 * WAIT_S)
    (one.parent / f".{one.name}.tmp").mkdir(exist_ok=True)  # of the child that was killed
    again.update.on_installed(event)
    assert [path.name for path in one.parent.iterdir()] == [av.FILE]


def test_a_release_that_does_not_start_is_refused_once_for_each_request(tmp_path: Path) -> None:
    desired = release_in(tmp_path, "import a_package_that_is_not_there")
    bench = Bench(tmp_path)
    bench.update.on_desired(desired, TRUSTED)
    bench.until(lambda: bench.reported.phase == "refused")
    assert "does not start: ModuleNotFoundError" in bench.reported.reason
    assert bench.update.report.reason == bench.reported.reason
    assert [path.name for path in (bench.state_dir / av.FOLDER).iterdir()] == [av.FILE]
    again = Bench(tmp_path)  # the agent was started again
    again.update.on_desired(desired, TRUSTED)
    assert (again.reported.phase, again.reported.reason) == ("refused", bench.reported.reason)
    again.update.on_desired(msgspec.structs.replace(desired, request="new"), TRUSTED)
    assert again.reported.phase == "downloading"
    again.update.stop()


@pytest.mark.parametrize(
    "missing",
    [
        "cryptography",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("securesystemslib", "tuf", "urllib3")),
    ],
)
def test_a_version_that_could_verify_no_release_is_refused_where_they_are_signed(
    tmp_path: Path, missing: str
) -> None:
    desired = offered(tmp_path, packed(tmp_path, "2.0", HANGS, SIGNED, missing))
    bench = Bench(tmp_path, dev=False)
    bench.update.on_desired(desired, TRUSTED)
    bench.until(lambda: bench.reported.phase == "refused")
    assert "version 2.0 of the agent cannot import" in bench.reported.reason
    assert f"No module named '{missing}'" in bench.reported.reason
    assert [path.name for path in (bench.state_dir / av.FOLDER).iterdir()] == [av.FILE]


def test_a_version_with_all_that_verifies_releases_is_tried(tmp_path: Path) -> None:
    desired = offered(tmp_path, packed(tmp_path, "2.0", HANGS, SIGNED))
    bench = Bench(tmp_path, dev=False)
    bench.update.on_desired(msgspec.structs.replace(desired, policy=NIGHT), TRUSTED)
    bench.until(lambda: bench.reported.phase == "postponed")


def test_a_refusal_that_the_disk_does_not_take_holds_until_the_agent_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)

    def full(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(av, "write_versions", full)
    bench.trial.refuse(TWO, DESIRED.request, "it does not fit")
    bench.update.on_desired(DESIRED, TRUSTED)
    assert (bench.reported.phase, bench.reported.reason) == ("refused", "it does not fit")
    assert Bench(tmp_path).trial.versions == AgentVersions()


def test_a_download_that_the_broker_interrupts_wakes_nobody(tmp_path: Path) -> None:
    bench = Bench(tmp_path, source="mqtt")
    bench.update.on_desired(DESIRED, TRUSTED)
    bench.update.advance(1.0, busy=False, mqtt=True, pipeline=False)
    assert bench.update.next_request(1.0, online=True) is not None
    assert bench.update.due_s(online=True) is not None
    assert bench.update.due_s(online=False) is None


def test_a_release_that_nobody_has_is_refused_with_the_reason(tmp_path: Path) -> None:
    desired = release_in(tmp_path)
    for bundle in tmp_path.glob("*.bundle"):
        bundle.unlink()
    bench = Bench(tmp_path)
    bench.update.on_desired(desired, TRUSTED)
    bench.until(lambda: bool(bench.reported.reason))
    assert str(tmp_path) in bench.reported.reason
    bench.update.on_desired(None, TRUSTED)
    assert bench.update.update is None


def test_a_document_that_is_cleared_supersedes_a_release_without_a_signature() -> None:
    agent = SimpleNamespace(
        _verification=SimpleNamespace(forget=lambda: None), _config=SimpleNamespace(dev=False)
    )
    assert Agent._verdict(agent, b"", None, "") == TRUSTED  # type: ignore[arg-type]
    assert isinstance(Agent._verdict(agent, b"{}", None, ""), Refused)  # type: ignore[arg-type]
