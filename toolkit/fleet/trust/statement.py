"""What lets a board without a connection to its fleet install a bundle: the director's signature
for this board, and the signed metadata that it needs, in one small file.
"""

import shutil
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec

from device.errors import TrustError
from device.protocol.documents import DOCUMENT_FORMAT, Desired, ReleaseSpec
from device.protocol.topics import DeviceId
from device.smp.inbox import Statement
from device.trust.exchange import Request, Trusted
from device.trust.fetchers import FolderFetcher
from device.trust.verify import verify
from device.update.bundle import read_bundle_info
from toolkit.errors import RolloutError
from toolkit.fleet.bundles.blob import Blob
from toolkit.fleet.bundles.facts import statements_of
from toolkit.fleet.rollout.gates import BUNDLE, Gate, check_bundle_gates
from toolkit.fleet.trust.director import addressed, next_counter, sign_desired
from toolkit.fleet.trust.publish import publish_bundle
from toolkit.fleet.trust.repository import FleetRepository


class _RecordingFetcher(FolderFetcher):
    """Notes which files a check has read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files: dict[str, str] = {}

    def read(self, path: str) -> bytes:
        data = super().read(path)
        self.files[path] = data.decode()
        return data


def make_statement(
    bundle: Path, device: str, fleet: Path, *, retry: bool = False, gates: Sequence[Gate] = ()
) -> bytes:
    """Return the statement by which one device takes a bundle, which is published if it is not.

    `retry`: also if the device has rolled it back before; `gates`: what the bundle must say of
    itself, before anything is published. It is checked as the device does it. Raises BundleError:
    the bundle is damaged. Raises TrustError: it cannot be signed, or `device` is no id of a device.
    Raises RolloutError: it does not pass a gate, or a gate is one on devices.
    """
    try:
        msgspec.convert(device, DeviceId)
    except msgspec.ValidationError as error:
        raise TrustError(
            f"{device!r} is no id of a device: take the `device` of its agent.toml"
        ) from error
    if gates:
        _check_gates(bundle, gates)
    repository = FleetRepository(fleet)
    published = publish_bundle(repository, bundle)
    repository.refresh(due_only=True)
    blob = Blob(bundle)
    blob.close()
    release = ReleaseSpec(
        name=published.name,
        version=published.version,
        profile=published.profile,
        blob=blob.spec,
        target=published.target,
    )
    desired = Desired(
        format=DOCUMENT_FORMAT, request=uuid.uuid4().hex, release=release, retry=retry
    )
    document = sign_desired(
        addressed(desired, device, next_counter()), repository.director_signer()
    )
    files = _files(document.decode(), device, fleet)
    return msgspec.json.encode(Statement(desired=document.decode(), files=files))


def _check_gates(bundle: Path, gates: Sequence[Gate]) -> None:
    if of_devices := [gate for gate in gates if not gate.name.startswith(BUNDLE)]:
        raise RolloutError(
            f"the gate {of_devices[0]} is on what devices measure, and a statement is made before "
            "any has: `tandem fleet rollout start` takes it"
        )
    info = read_bundle_info(bundle)
    check_bundle_gates(gates, f"{info.name} {info.version}", statements_of(info))


def _files(document: str, device: str, fleet: Path) -> dict[str, str]:
    """Return the metadata that a check by a board of this fleet reads, and every root."""
    served = fleet / "repository"
    fetcher = _RecordingFetcher(served)
    with tempfile.TemporaryDirectory() as folder:
        trust = Path(folder) / "trust"
        trust.mkdir()
        # Without the director's document, so that it is read from the repository.
        shutil.copy(fleet / "trust" / "root.json", trust)
        request = Request(
            device=device,
            desired=document,
            trust_dir=str(trust),
            state_dir=str(Path(folder) / "state"),
            repository=str(served),
        )
        verdict = verify(request, fetcher)
    if not isinstance(verdict, Trusted):
        raise TrustError(f"no device would take this statement: {verdict.reason}")
    roots = {
        f"metadata/{path.name}": path.read_text()
        for path in (served / "metadata").glob("*.root.json")
    }
    return {**roots, **fetcher.files}
