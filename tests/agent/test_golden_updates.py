"""Golden inputs on the way of a release: before its trial, in a child, with the policy's limits."""

import errno
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_fixtures import Pipeline
from mqtt_fixtures import PROFILE

from device.agent.config import AgentConfig, BrokerTable, PipelineTable
from device.agent.golden_check import MISSING, GoldenCheck, GoldenEnded
from device.agent.updater import EFFECTS, Updater
from device.errors import BundleError
from device.protocol.documents import DOCUMENT_FORMAT, Desired, InstallPolicy, ReleaseSpec
from device.trust.exchange import TRUSTED, Unverified
from device.update import slots
from device.update.bundle import BundleFacts, Golden, write_bundle, write_bundle_of_service
from device.update.events import Checked, Do
from device.update.slot_store import SlotStore
from toolkit.fleet.bundles.blob import Blob

PATIENCE_S = 60.0
# Stands for the child that runs the engine: says what the file of golden inputs says.
CHILD = "import sys; sys.stdout.write(open(sys.argv[2]).read())"
RESULT = '{"samples": 3, "agreement": %s, "worst": "y", "latency_p95_ms": 12.0}'


class GoldenBoard:
    """An updater that runs golden inputs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[GoldenEnded] = []
        self.store = SlotStore(folder / "state")
        config = AgentConfig(
            device="dev1",
            profile=PROFILE,
            state_dir=str(folder / "state"),
            dev=True,
            broker=BrokerTable(host="127.0.0.1"),
            pipeline=PipelineTable(services=True),
        )
        check = GoldenCheck(self.events.append, command=(sys.executable, "-c", CHILD))
        self.updater = Updater(
            config,
            self.store,
            Pipeline(),  # type: ignore[arg-type]
            lambda: None,
            golden=check,
        )
        self.updater.boot()

    def deploy(
        self, agreement: float, request: str, policy: InstallPolicy, *, golden: bool = True
    ) -> Desired:
        """Give the updater a bundle whose golden inputs will agree so far, and let it go on."""
        update = self.download(agreement, request, policy, golden=golden)
        self.updater.advance(time.monotonic())
        return update

    def download(
        self, agreement: float, request: str, policy: InstallPolicy, *, golden: bool = True
    ) -> Desired:
        """Give the updater all parts of a bundle whose golden inputs will agree so far."""
        for name, text in (("e", "engine"), ("p", "p"), ("l", "l")):
            (self.folder / name).write_text(text)
        (self.folder / "g").write_text(RESULT % agreement)
        bundle = self.folder / f"{agreement}.bundle"
        write_bundle(
            bundle,
            engine=self.folder / "e",
            pipeline=self.folder / "p",
            labels=self.folder / "l",
            golden=self.folder / "g" if golden else None,
            facts=BundleFacts(golden=Golden(samples=3, tolerance=0.02) if golden else None),
            name="n",
            version="1",
            profile=PROFILE,
        )
        return self.offer(bundle, request, policy)

    def offer(self, bundle: Path, request: str, policy: InstallPolicy) -> Desired:
        """Give the updater all parts of a bundle."""
        blob = Blob(bundle)
        parts = {"index": blob.index, **{str(n): blob.read(n) for n in range(blob.table.count)}}
        blob.close()
        release = ReleaseSpec(name="n", version="1", profile=PROFILE, blob=blob.spec)
        desired = Desired(format=DOCUMENT_FORMAT, request=request, release=release, policy=policy)
        self.updater.on_desired(desired, TRUSTED)
        for part, payload in parts.items():
            self.updater.downloads.take(blob.spec.sha256, part, payload, 0.0)
        return desired

    def pump(self) -> None:
        """Give the updater the end of the child."""
        end_s = time.monotonic() + PATIENCE_S
        while not self.events:
            assert time.monotonic() < end_s
            time.sleep(0.02)
        self.updater.on_golden(self.events.pop(0))


@pytest.fixture
def board(tmp_path: Path) -> Iterator[GoldenBoard]:
    board = GoldenBoard(tmp_path)
    yield board
    board.updater.shut_down()
    board.store.close()


def test_a_release_whose_outputs_agree_is_tried_and_says_how_well(board: GoldenBoard) -> None:
    board.deploy(0.97, "r", InstallPolicy())
    assert board.updater.update.phase == "staging"
    assert board.updater.update.reason == "the golden inputs of the bundle run"
    assert board.updater.state.trial is None
    board.pump()
    assert board.updater.update.phase == "trial"
    record = board.updater.state.a
    assert record is not None
    assert record.golden_agreement == 0.97


def test_what_the_policy_asks_reaches_the_check(
    board: GoldenBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[float | None] = []

    def start(_: GoldenCheck, __: Path, min_agreement: float | None = None) -> bool:
        requests.append(min_agreement)
        return False

    monkeypatch.setattr(GoldenCheck, "start", start)
    board.deploy(0.9, "r", InstallPolicy(min_golden_agreement=0.8))
    assert requests == [0.8]


def test_a_limit_of_agreement_that_nothing_can_measure_is_asked_for_once(
    board: GoldenBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = []

    def start(_: GoldenCheck, folder: Path, __: float | None = None) -> bool:
        starts.append(folder)
        assert len(starts) == 1
        raise BundleError("bundle.json cannot be read")

    monkeypatch.setattr(GoldenCheck, "start", start)
    board.deploy(0.9, "r", InstallPolicy(min_golden_agreement=0.8))
    assert board.updater.update.phase == "refused"
    assert board.updater.update.reason == "bundle.json cannot be read"
    assert not board.updater.state.failures  # another try may go well
    board.updater._golden = None
    outcome = EFFECTS["golden"](board.updater, Do("golden", slot="a"))
    assert outcome == Checked("golden", MISSING)


@pytest.mark.parametrize(
    ("agreement", "policy"),
    [
        (0.5, InstallPolicy()),
        (0.97, InstallPolicy(min_golden_agreement=0.98)),
        (1.0, InstallPolicy(max_latency_p95_ms=11.0)),
    ],
)
def test_a_release_that_does_not_pass_never_runs(
    board: GoldenBoard, agreement: float, policy: InstallPolicy
) -> None:
    update = board.deploy(agreement, "r", policy)
    board.pump()
    assert board.updater.update.phase == "refused"
    assert board.updater.state.trial is None
    board.updater.on_desired(update, TRUSTED)  # the same request: refused for good
    assert board.updater.update.phase == "refused"
    assert not board.events
    board.deploy(agreement, "again", InstallPolicy(min_golden_agreement=0.1))
    board.pump()  # another request runs them again
    assert board.updater.update.phase == "trial"


@pytest.mark.parametrize(
    ("policy", "phase"),
    [(InstallPolicy(), "trial"), (InstallPolicy(min_golden_agreement=0.9), "refused")],
)
def test_a_bundle_without_golden_inputs_passes_only_where_nobody_asks(
    board: GoldenBoard, policy: InstallPolicy, phase: str
) -> None:
    board.deploy(1.0, "r", policy, golden=False)
    assert board.updater.update.phase == phase


def test_a_service_has_no_golden_inputs_which_the_log_says_by_its_name(
    board: GoldenBoard, caplog: pytest.LogCaptureFixture
) -> None:
    (board.folder / "p").write_text("p")
    bundle = board.folder / "vlm.bundle"
    write_bundle_of_service(
        bundle, payload={"payload/run": board.folder / "p"}, executables=("payload/run",),
        pipeline=board.folder / "p", name="n", version="1", profile=PROFILE,
    )  # fmt: skip
    board.offer(bundle, "r", InstallPolicy(min_golden_agreement=0.9))
    board.updater.advance(time.monotonic())
    assert board.updater.update.phase == "trial"
    assert "min_golden_agreement is left out: n is a service" in caplog.messages


def test_a_document_that_is_not_trusted_any_more_starts_nothing(board: GoldenBoard) -> None:
    update = board.deploy(1.0, "r", InstallPolicy())
    board.updater.on_desired(update, Unverified(reason="its signatures are being checked"))
    board.pump()
    assert board.updater.state.trial is None
    board.updater.on_desired(update, TRUSTED)
    board.pump()
    assert board.updater.update.phase == "trial"


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("subprocess.Popen", OSError(errno.EAGAIN, "Resource temporarily unavailable")),
        ("threading.Thread.start", RuntimeError("can't start new thread")),
    ],
)
def test_a_system_that_starts_no_process_refuses_no_release_for_good(
    board: GoldenBoard, monkeypatch: pytest.MonkeyPatch, what: str, error: Exception
) -> None:
    def fail(*_of: object, **_more: object) -> None:
        raise error

    board.deploy(1.0, "before", InstallPolicy(), golden=False)
    board.updater._slots.save(slots.confirm(board.updater.state))
    board.updater.boot()
    update = board.download(0.97, "r", InstallPolicy())
    with monkeypatch.context() as patch:
        patch.setattr(what, fail)
        board.updater.advance(time.monotonic())
        assert board.events
    board.pump()
    assert board.updater.update.phase == "refused"
    assert "can be started" in board.updater.update.reason
    board.updater.on_desired(update, TRUSTED)  # as after each connection
    board.pump()
    assert board.updater.update.phase == "trial"
