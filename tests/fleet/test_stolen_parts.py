"""Somebody with a stolen part of a fleet, against a real broker and a real agent: nothing of his is
ever installed, the board says why, and takes the fleet's next release as if nothing had been.

What each signature rule refuses, one by one, is in test_trust_attacks.py.
"""

import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from deploy_fixtures import deploy
from mqtt_fixtures import DEVICE, PROFILE, AgentBox, Mosquitto, Watcher, make_bundle
from msgspec.structs import replace

from device.protocol.documents import (
    DOCUMENT_FORMAT,
    BlobGet,
    Desired,
    ReleaseSpec,
    Reported,
    decode,
    encode,
)
from device.protocol.mqtt import Link, LinkEvent, LinkSettings, LinkUp, Message
from device.protocol.signed import open_desired, sign_document
from device.protocol.topics import PREFIX, Topics
from device.update.bundle import verify_folder
from toolkit.fleet.bundles.blob import Blob
from toolkit.fleet.folder import make_fleet
from toolkit.fleet.server.metadata import MetadataServer
from toolkit.fleet.transports.deploy import DeployOptions
from toolkit.fleet.transports.device_deployment import DeployResult
from toolkit.fleet.trust.director import addressed, next_counter, sign_desired
from toolkit.fleet.trust.keys import load_keys
from toolkit.fleet.trust.publish import publish_bundle
from toolkit.fleet.trust.repository import FleetRepository, make_repository

LONG_S = 60.0
TOPICS = Topics(DEVICE)
Reshape = Callable[[bytes], bytes]


class Thief(threading.Thread):
    """A client that may publish anything: it has the broker, and answers for the fleet's server.

    `repository`: whose metadata it shows; `reshape`: what it makes of each chunk.
    """

    def __init__(self, port: int, repository: Path, bundle: Path, reshape: Reshape) -> None:
        super().__init__(daemon=True)
        self._events: queue.Queue[LinkEvent | None] = queue.Queue()
        self._blob = Blob(bundle)
        self._metadata = MetadataServer(repository)
        self._reshape = reshape
        self.chunks, self.chunks_sent = self._blob.table.count, 0
        self._retained: dict[str, bytes] = {}
        self._heard = threading.Condition()
        settings = LinkSettings("127.0.0.1", port, "thief", ((f"{PREFIX}/#", 1),))
        self._link = Link(settings, self._events.put)

    def __enter__(self) -> "Thief":
        self._link.start()
        while not isinstance(self._events.get(timeout=LONG_S), LinkUp):
            pass
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._events.put(None)
        self.join()
        self._link.close()
        self._blob.close()

    def publish(self, document: bytes) -> None:
        assert self._link.publish(TOPICS.desired, document, qos=1, retain=True, wait_s=LONG_S)

    def overheard(self, topic: str) -> bytes:
        """What the broker retains on a topic."""
        with self._heard:
            assert self._heard.wait_for(lambda: topic in self._retained, LONG_S)
            return self._retained[topic]

    def run(self) -> None:
        while (event := self._events.get()) is not None:
            if isinstance(event, Message):
                with self._heard:
                    self._retained.setdefault(event.topic, event.payload)
                    self._heard.notify()
            if not isinstance(event, Message) or self._metadata.handle(self._link, event):
                continue
            if event.topic == TOPICS.blob_get:
                get = decode(event.payload, BlobGet)
                if get.sha256 == self._blob.spec.sha256:
                    self._serve(get)

    def _serve(self, get: BlobGet) -> None:
        for part in self._blob.parts_of(get):
            payload = self._blob.read(part)
            if isinstance(part, int):
                payload = self._reshape(payload)
                self.chunks_sent += 1
            self._link.publish_bulk(TOPICS.chunk(get.sha256, part, "thief"), payload)


@dataclass
class Scene:
    """A board that runs releases of its fleet, and what an attacker needs."""

    folder: Path
    broker: Mosquitto
    fleet: FleetRepository
    board: AgentBox
    watcher: Watcher

    def bundle(self, behaviour: str, version: str) -> Path:
        return make_bundle(self.folder / "in", behaviour, version=version, engine_bytes=200_000)

    def deploy(self, bundle: Path) -> DeployResult:
        return deploy(self.broker.port, bundle, DeployOptions(LONG_S, fleet=self.fleet.fleet))

    def desired(self, bundle: Path, target: str, request: str) -> Desired:
        """A document for the board that says all that one of the fleet says."""
        blob = Blob(bundle)
        blob.close()
        name, version = bundle.stem.rsplit("-", 1)
        release = ReleaseSpec(
            name=name, version=version, profile=PROFILE, blob=blob.spec, target=target
        )
        document = Desired(format=DOCUMENT_FORMAT, request=request, release=release)
        return addressed(document, DEVICE, next_counter())

    def thief(
        self, bundle: Path, *, fleet: FleetRepository | None = None, reshape: Reshape = bytes
    ) -> Thief:
        folder = (fleet or self.fleet).fleet / "repository"
        return Thief(self.broker.port, folder, bundle, reshape)

    def answer(self, request: str, *phases: str) -> Reported:
        """Return the board's report on a request once it is in one of these phases."""
        until_s = time.monotonic() + LONG_S
        while True:
            for report in self.watcher.drain().reports[::-1]:
                if report.update.request == request and report.update.phase in phases:
                    return report
            assert time.monotonic() < until_s, (self.watcher.seen.reports[-1], self.board.log())
            self.watcher.take(1.0)

    def installed(self) -> set[str]:
        """The versions of all releases that are unpacked on the board or were started there."""
        folders = (self.board.state_dir / "slots").iterdir()
        return {verify_folder(path).version for path in folders if any(path.iterdir())}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("stolen")
    broker = Mosquitto(folder)
    make_fleet(folder / "fleet", name="f", broker=f"127.0.0.1:{broker.port}", root_keys=2)
    fleet = FleetRepository(folder / "fleet")
    shutil.copytree(fleet.trust, folder / "trust")
    board = AgentBox(folder, broker.tls_port, dev=False, ca=broker.ca, trial_timeout_s=LONG_S)
    board.start()
    with Watcher(broker.port) as watcher:
        yield Scene(folder, broker, fleet, board, watcher)
    board.close()
    broker.close()


@pytest.fixture
def runs(scene: Scene) -> Iterator[str]:
    """The version that the board runs: the fleet's next one, which it takes before each attack and
    after it."""
    versions = count(len(scene.board.runs()) + 1)
    version = str(next(versions))
    assert scene.deploy(scene.bundle("good", version)).live
    yield version
    after = str(next(versions))
    result = scene.deploy(scene.bundle("good", after))
    assert result.live, result
    assert after in scene.installed()
    assert {name for name, _pid in scene.board.runs()} == {"good"}


def test_a_stolen_broker_installs_nothing(scene: Scene, runs: str) -> None:
    """It knows every topic, shows a repository of its own and signs with keys of its own."""
    evil = scene.bundle("evil", "66")
    thief_repository = make_repository(scene.folder / "own")
    target = publish_bundle(thief_repository, evil).target
    desired = scene.desired(evil, target, "broker")
    with scene.thief(evil, fleet=thief_repository) as thief:
        thief.publish(encode(desired))
        unsigned = scene.answer("broker", "refused")
        thief.publish(
            sign_desired(replace(desired, request="forged"), thief_repository.director_signer())
        )
        forged = scene.answer("forged", "refused")
    assert "is not signed" in unsigned.update.reason
    assert "is not signed by enough of the keys that root trusts" in forged.update.reason
    assert (thief.chunks_sent, forged.running and forged.running.version) == (0, runs)
    assert "66" not in scene.installed()


def test_a_stolen_build_server_installs_nothing(scene: Scene, runs: str) -> None:
    """It has the keys of targets, snapshot and timestamp: its release is really published."""
    evil = scene.bundle("evil", "67")
    target = publish_bundle(scene.fleet, evil).target
    (key,) = load_keys(scene.fleet.keys, "targets").values()
    with scene.thief(evil) as thief:
        thief.publish(sign_document(scene.desired(evil, target, "build-server"), (key,)))
        report = scene.answer("build-server", "refused")
    assert "is signed by 0 of the director's keys" in report.update.reason
    assert (thief.chunks_sent, report.running and report.running.version) == (0, runs)
    assert "67" not in scene.installed()
    for role in ("targets", "snapshot", "timestamp"):
        scene.fleet.rotate(role)  # the fleet ends the stolen keys, and the board follows


def test_an_old_signed_release_is_not_installed_again(scene: Scene, runs: str) -> None:
    """The attacker has kept what the fleet itself signed for this board, and its bundle."""
    old = scene.bundle("good", runs)
    with scene.thief(old) as thief:
        message = thief.overheard(TOPICS.desired)
        request = open_desired(message)[0].request
        newer = str(int(runs) + 50)
        assert scene.deploy(scene.bundle("good", newer)).live
        scene.watcher.seen.reports.clear()
        thief.publish(message)
        report = scene.answer(request, "refused")
    assert "this board has taken" in report.update.reason
    assert (thief.chunks_sent, report.running and report.running.version) == (0, newer)


@pytest.mark.parametrize(
    "reshape",
    [lambda chunk: chunk[:-1], lambda chunk: bytes((chunk[0] ^ 1,)) + chunk[1:]],
    ids=["truncated", "one bit"],
)  # fmt: skip
def test_chunks_that_are_not_the_release_s_are_not_installed(
    scene: Scene, runs: str, reshape: Reshape
) -> None:
    """The release is the fleet's and signed by it; who serves its chunks is not honest."""
    bundle = scene.bundle("good", f"{int(runs) + 80}")
    target = publish_bundle(scene.fleet, bundle).target
    desired = scene.desired(bundle, target, f"chunks-{runs}")
    with scene.thief(bundle, reshape=reshape) as thief:
        thief.publish(sign_desired(desired, scene.fleet.director_signer()))
        until_s = time.monotonic() + LONG_S
        while thief.chunks_sent <= thief.chunks:  # the board asks for one again
            assert time.monotonic() < until_s, (thief.chunks_sent, scene.watcher.drain())
            scene.watcher.take(0.1)
        report = scene.answer(desired.request, "downloading")
        assert scene.watcher.drain().reports[-1].update == report.update  # it is the newest
    assert report.running is not None
    assert report.running.version == runs
    assert f"{int(runs) + 80}" not in scene.installed()
