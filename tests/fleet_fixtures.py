"""A fleet's folder, and requests of a device answered from it, for the tests of signed releases."""

import copy
import shutil
from datetime import datetime, timedelta, timezone
from pathlib import Path

import msgspec
from mqtt_fixtures import DEVICE, make_bundle
from securesystemslib.signer import CryptoSigner

from device.protocol.documents import DOCUMENT_FORMAT, Desired, ReleaseSpec
from device.protocol.signed import sign_document
from device.trust.exchange import Request, Verdict
from device.trust.fetchers import FolderFetcher
from device.trust.verify import verify
from toolkit.fleet.bundles.blob import Blob
from toolkit.fleet.trust.director import addressed
from toolkit.fleet.trust.publish import publish_bundle
from toolkit.fleet.trust.repository import FleetRepository, make_repository


class Fleet:
    """A fleet's folder with one published release, and the folder of one board, below `base`."""

    def __init__(self, base: Path, *, root_keys: int = 2, threshold: int = 2) -> None:
        make_repository(base / "fleet", root_keys=root_keys, threshold=threshold)
        self._open(base)
        shutil.copytree(self.folder / "trust", self.trust)
        self.bundle = make_bundle(base / "in", engine_bytes=3000)
        self.release = self.publish(self.bundle)

    def _open(self, base: Path) -> None:
        self.base = base
        self.folder = base / "fleet"
        self.served = self.folder / "repository"
        self.trust = base / "board" / "trust"
        self.state = base / "board" / "state"
        self.repository = FleetRepository(self.folder)

    def copied(self, base: Path) -> "Fleet":
        """The same fleet in another folder, which a test may change."""
        shutil.copytree(self.base, base, symlinks=True)
        duplicate = copy.copy(self)
        duplicate._open(base)
        return duplicate

    def publish(self, bundle: Path) -> ReleaseSpec:
        published = publish_bundle(self.repository, bundle)
        blob = Blob(bundle)
        blob.close()
        return ReleaseSpec(
            name=published.name,
            version=published.version,
            profile=published.profile,
            blob=blob.spec,
            target=published.target,
        )

    def desired(self, counter: int = 1, device: str = DEVICE, **changes: object) -> Desired:
        document = Desired(format=DOCUMENT_FORMAT, request=f"r{counter}", release=self.release)
        return msgspec.structs.replace(addressed(document, device, counter), **changes)

    def signed(self, desired: Desired, *signers: CryptoSigner) -> bytes:
        return sign_document(desired, signers or (self.repository.director_signer(),))

    def request(self, document: bytes, state: Path | None = None) -> Request:
        return Request(
            device=DEVICE,
            desired=document.decode(),
            trust_dir=str(self.trust),
            state_dir=str(state or self.state),
        )

    def verify(self, document: bytes, served: Path | None = None) -> Verdict:
        """What the board makes of a document, with the metadata of a folder."""
        return verify(self.request(document), FolderFetcher(served or self.served))


def utc(days: float) -> str:
    """The time so many days from now, as documents write it."""
    moment = datetime.now(timezone.utc) + timedelta(days=days)
    return moment.replace(microsecond=0, tzinfo=None).isoformat() + "Z"
