"""What goes to a board: the bundle in chunks, its desired document and signed metadata."""

import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from device.control.upload_request import DESIRED, DESIRED_OF, REPOSITORY
from device.protocol.documents import Desired, InstallPolicy, ReleaseSpec, encode, format_of
from device.update.bundle import BundleInfo, check_bundle, read_bundle_info
from toolkit.errors import FleetError
from toolkit.fleet.bundles.blob import Blob

if TYPE_CHECKING:
    from toolkit.fleet.trust.repository import FleetRepository

DEFAULT_POLICY = InstallPolicy()
_VERSIONED = re.compile(r"(\d+)\.(\w+)\.json\Z")


class Delivery:
    """A bundle, with the keys of a fleet's folder that sign for it; `close` it."""

    def __init__(
        self,
        bundle: Path,
        fleet: Path | None,
        *,
        erase: bool = False,
        policy: InstallPolicy = DEFAULT_POLICY,
        retry: bool = True,
        compare_hashes: bool = True,
    ) -> None:
        """Raises BundleError: it is damaged. `erase`: forget what an earlier transfer left.

        `retry`: also where the release was rolled back before. `compare_hashes`: check the bundle
        here, and do not leave that to the devices.
        """
        self.policy = policy
        self.retry = retry
        self.bundle = bundle
        self.fleet = fleet
        self.erase = erase
        self.info: BundleInfo = (
            check_bundle(bundle)[0] if compare_hashes else read_bundle_info(bundle)
        )
        self.blob = Blob(bundle)
        self.request = uuid.uuid4().hex
        self._repository: FleetRepository | None = None
        self._target = ""

    @property
    def signed(self) -> bool:
        """Whether desired documents are signed."""
        return self.fleet is not None

    @property
    def named(self) -> str:
        """Name and version, for sentences."""
        return f"{self.info.name} {self.info.version}"

    @property
    def document(self) -> Desired:
        """The desired document, without what binds it to one device."""
        info = self.info
        release = ReleaseSpec(
            name=info.name, version=info.version, profile=info.profile, blob=self.blob.spec
        )
        return Desired(
            format=format_of(self.policy),
            request=self.request,
            release=release,
            retry=self.retry,
            policy=self.policy,
        )

    def desired(self, device: str) -> bytes:
        """Return the desired document for one device; TrustError if it cannot be signed."""
        document = self.document
        if self.fleet is None:
            return encode(document)
        from toolkit.fleet.trust.director import addressed, next_counter, sign_desired

        repository = self._published(self.fleet)
        release = msgspec.structs.replace(document.release, target=self._target)
        document = msgspec.structs.replace(document, release=release)
        signer = repository.director_signer()
        return sign_desired(addressed(document, device, next_counter()), signer)

    def files(self, *devices: str) -> dict[str, bytes]:
        """Return the small files beside the bundle by their paths; no devices: for every one."""
        documents = {DESIRED_OF.format(device=device): self.desired(device) for device in devices}
        return (documents or {DESIRED: self.desired("")}) | self.metadata()

    def metadata(self) -> dict[str, bytes]:
        """Return the signed metadata that a check reads, by paths; none without a fleet."""
        if self.fleet is None:
            return {}
        self._published(self.fleet)
        folder = self.fleet / "repository"
        try:
            paths = [
                *_newest(folder / "metadata"),
                *(folder / "targets").glob("*director.json"),
            ]
            files = ((path.relative_to(folder).as_posix(), path.read_bytes()) for path in paths)
            return {f"{REPOSITORY}/{name}": content for name, content in files}
        except OSError as error:
            raise FleetError(
                f"cannot read the metadata of {self.fleet}: {error.strerror}"
            ) from error

    def close(self) -> None:
        """Close the bundle."""
        self.blob.close()

    def _published(self, fleet: Path) -> "FleetRepository":
        """Publish the bundle once; return the fleet's repository."""
        if self._repository is None:
            from toolkit.fleet.trust.publish import publish_bundle
            from toolkit.fleet.trust.repository import FleetRepository

            repository = FleetRepository(fleet)
            self._target = publish_bundle(repository, self.bundle).target
            repository.refresh(due_only=True)
            self._repository = repository
        return self._repository


def _newest(folder: Path) -> list[Path]:
    """Return every root, by which a board follows the keys, and the newest of each other file."""
    newest: dict[str, tuple[int, Path]] = {}
    paths = [folder / "timestamp.json"]
    for path in folder.iterdir():
        match = _VERSIONED.match(path.name)
        if match is None:
            continue
        version, role = int(match[1]), match[2]
        if role == "root":
            paths.append(path)
        elif version > newest.get(role, (0, path))[0]:
            newest[role] = version, path
    return [*paths, *(path for _, path in newest.values())]
