"""Releases on this host that a board has in a slot: what it lacks is sent as a difference."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from device.files import sha256_of
from toolkit.fleet.bundles.blob import Blob
from toolkit.fleet.bundles.delta import DeltaEncoder
from toolkit.fleet.bundles.library import Library

MAX_BESIDE = 32  # bundles beside the one that is flashed: each is hashed


def difference_encoder(
    blob: Blob, bases: Sequence[str], fleet: Path | None
) -> tuple[DeltaEncoder, Blob] | None:
    """Return what encodes chunks of a bundle against the first base that is on this host.

    `bases`: SHA-256 of releases on the board. Looked for in the fleet's repository, and beside the
    bundle. The base is to be closed. Raises OSError.
    """
    for number, sha256 in enumerate(bases):
        if sha256 == blob.spec.sha256:
            continue
        base = _published(sha256, fleet) or _beside(blob.path, sha256)
        if base is not None:
            return DeltaEncoder(blob.file, base.file, number), base
    return None


def _published(sha256: str, fleet: Path | None) -> Blob | None:
    return None if fleet is None else Library(fleet / "repository").blob(sha256)


def _beside(bundle: Path, sha256: str) -> Blob | None:
    paths = [path for path in sorted(bundle.parent.glob(f"*{bundle.suffix}")) if path != bundle]
    for path in paths[:MAX_BESIDE]:
        with contextlib.suppress(OSError):  # not ours to read, or gone: it is no base
            if path.is_file() and sha256_of(path) == sha256:
                return Blob(path)
    return None
