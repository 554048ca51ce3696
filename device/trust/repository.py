"""TUF metadata of the fleet's repository, refreshed and verified by python-tuf.

python-tuf keeps what it verified in a folder, by rename but without fsync. The journal makes up for
what a power cut may take from there; the files themselves are fetched again.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tuf.api.exceptions import (
    DownloadError,
    DownloadHTTPError,
    DownloadLengthMismatchError,
    ExpiredMetadataError,
    RepositoryError,
    UnsignedMetadataError,
)
from tuf.api.metadata import Metadata, Root, Snapshot, TargetFile, Targets, Timestamp
from tuf.api.serialization import DeserializationError
from tuf.ngclient import Updater, UpdaterConfig

from device.errors import TrustError
from device.files import make_folder
from device.trust.fetchers import METADATA, NOT_FOUND, TARGETS, WholeFileFetcher
from device.trust.journal import Journal, SeenVersion

# The longest files that are read; python-tuf checks them by these.
LIMITS = UpdaterConfig(
    max_root_rotations=256,
    max_delegations=32,
    root_max_length=512_000,
    timestamp_max_length=16_384,
    snapshot_max_length=2_000_000,
    targets_max_length=5_000_000,
)


class UnreachableError(TrustError):
    """A file of the repository could not be fetched: that says nothing of the release."""


class TrustedRepository:
    """The repository as this board knows it; `refresh` comes first."""

    def __init__(
        self, trusted_root: bytes, folder: Path, fetcher: WholeFileFetcher, journal: Journal
    ) -> None:
        """`trusted_root`: what the board was provisioned with; `folder`: for verified metadata."""
        self._folder = folder
        self._fetcher = fetcher
        self._journal = journal
        make_folder(folder)
        for path in folder.glob("tmp*"):  # of a check that was killed while it wrote
            path.unlink(missing_ok=True)
        with _sentences(fetcher):
            self._updater = Updater(
                str(folder),
                fetcher.base + METADATA,
                str(folder),
                fetcher.base + TARGETS,
                fetcher,
                LIMITS,
                bootstrap=trusted_root,
            )

    @property
    def root(self) -> Root:
        """The newest root that is trusted."""
        return Metadata[Root].from_file(str(self._folder / "root.json")).signed

    def refresh(self) -> None:
        """Bring the metadata up to date and note their versions.

        Raises UnreachableError: a file cannot be fetched. Raises TrustError: a file is not signed
        by enough keys, expired, damaged, or older than one that was seen.
        """
        try:
            with _sentences(self._fetcher):
                self._updater.refresh()
        finally:
            # Also after a failure: a new root may have revoked the keys of what failed.
            root = self.root
            self._journal.check_version("root", root.version, "")
            self._journal.note({"root": SeenVersion(root.version)})
        self._note_versions(root)

    def _note_versions(self, root: Root) -> None:
        keys = _keys_text(root)
        versions = {
            "timestamp": self._load(Timestamp.type).version,
            "snapshot": self._load(Snapshot.type).version,
            "targets": self._load(Targets.type).version,
        }
        for name, version in versions.items():
            self._journal.check_version(name, version, keys)
        self._journal.note({name: SeenVersion(version, keys) for name, version in versions.items()})

    def target(self, path: str) -> TargetFile | None:
        """Return what signed metadata say of a target, None if there is none."""
        with _sentences(self._fetcher):
            return self._updater.get_targetinfo(path)

    def fetch(self, target: TargetFile, path: Path) -> None:
        """Fetch a small target into a file and verify it; large ones come in chunks."""
        with _sentences(self._fetcher):
            self._updater.download_target(target, str(path))

    def _load(self, role: str) -> Timestamp | Snapshot | Targets:
        # Verified by the refresh a moment ago, which has just written or read it.
        signed = Metadata.from_file(str(self._folder / f"{role}.json")).signed
        assert isinstance(signed, Timestamp | Snapshot | Targets)
        return signed


def _keys_text(root: Root) -> str:
    """Return a text that changes with the keys of timestamp and snapshot, or their thresholds."""
    roles = [root.roles[name] for name in (Timestamp.type, Snapshot.type)]
    text = "; ".join(f"{role.threshold} {' '.join(sorted(role.keyids))}" for role in roles)
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def _sentences(fetcher: WholeFileFetcher) -> Iterator[None]:
    """Turn python-tuf's errors into ours, with the name of the file that was asked for last."""
    try:
        yield
    except DownloadHTTPError as error:
        if error.status_code != NOT_FOUND:
            raise UnreachableError(
                f"the repository answered {fetcher.last} with the status {error.status_code}"
            ) from error
        raise TrustError(
            f"the repository has no {fetcher.last}: publish again with `tandem fleet publish`"
        ) from error
    except DownloadLengthMismatchError as error:
        raise TrustError(f"{fetcher.last} is longer than signed metadata say ({error})") from error
    except DownloadError as error:
        raise UnreachableError(f"the signed repository cannot be reached: {error}") from error
    except ExpiredMetadataError as error:
        raise TrustError(
            f"the repository's metadata are too old ({error}): sign them again with `tandem fleet "
            "refresh`, and compare the board's clock"
        ) from error
    except UnsignedMetadataError as error:
        raise TrustError(
            f"{_file(fetcher)} is not signed by enough of the keys that root trusts ({error})"
        ) from error
    except DeserializationError as error:
        raise TrustError(
            f"{_file(fetcher)} is not TUF metadata: it is cut off or damaged"
        ) from error
    except RepositoryError as error:
        raise TrustError(f"{_file(fetcher)} contradicts what is signed: {error}") from error
    except ValueError as error:
        raise TrustError(f"{_file(fetcher)} is not valid TUF metadata: {error}") from error


def _file(fetcher: WholeFileFetcher) -> str:
    return fetcher.last or "the root.json that this board was provisioned with"
