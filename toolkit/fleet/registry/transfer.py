"""Push a bundle to a registry, resolve a tag, pull by digest: all go on after a cut connection."""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import urllib3

from device.errors import BundleError
from device.files import sync_folder
from device.update.bundle import check_bundle
from toolkit.errors import RegistryError
from toolkit.fleet.registry.client import CutError, RegistryClient
from toolkit.fleet.registry.manifest import (
    BUNDLE_TYPE,
    CONFIG_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    describe_blob,
    digest_of,
    encode_manifest,
    pieces_in,
)
from toolkit.progress import Progress

PIECE_BYTES = 32 * 1024**2
READ_BYTES = 256 * 1024
MAX_TRIES = 6  # without a byte more
FIRST_PAUSE_S = 0.25  # doubles with each
MAX_PAUSE_S = 8.0
PART_SUFFIX = ".part"
T = TypeVar("T")


class Pushed(msgspec.Struct, frozen=True, kw_only=True):
    """What was pushed. `sent_bytes`: of the bundle; 0 if the registry had all of it."""

    reference: str
    digest: str
    sha256: str
    bytes: int
    sent_bytes: int


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """What a reference leads to now: the manifest by its digest, and the bundle in pieces."""

    digest: str
    pieces: tuple[Descriptor, ...]

    @property
    def bytes(self) -> int:
        """The bytes of the bundle."""
        return sum(piece.size for piece in self.pieces)


def push(client: RegistryClient, bundle: Path, report: Progress) -> Pushed:
    """Push a checked bundle under the tag of the client's reference.

    Pieces that the registry has are not sent. Raises BundleError: it is damaged; RegistryError: the
    registry does not take it.
    """
    info, _ = check_bundle(bundle)
    if not client.reference.tag:
        raise RegistryError(f"{client.reference} has no tag: write oci://HOST/NAME:TAG to push")
    size = bundle.stat().st_size
    config_data = msgspec.json.encode(info)
    config = describe_blob(CONFIG_TYPE, config_data)
    send(client, config, config_data)
    pieces: list[Descriptor] = []
    sent_bytes, whole = 0, hashlib.sha256()
    with bundle.open("rb") as file:
        while data := file.read(PIECE_BYTES):
            whole.update(data)
            pieces.append(describe_blob(BUNDLE_TYPE, data))
            sent_bytes += send(client, pieces[-1], data)
            report("push", sum(piece.size for piece in pieces) / size)
    manifest = encode_manifest(info, config, pieces)
    url = client.url(f"manifests/{client.reference.tag}")
    headers = {"Content-Type": MANIFEST_TYPE}
    again(lambda: client.ask("PUT", url, expect=(201,), headers=headers, body=manifest))
    return Pushed(
        reference=str(client.reference),
        digest=digest_of(manifest),
        sha256=whole.hexdigest(),
        bytes=size,
        sent_bytes=sent_bytes,
    )


def resolve(client: RegistryClient) -> Resolved:
    """Ask once what the reference leads to. Raises RegistryError."""
    reference = client.reference
    url = client.url(f"manifests/{reference.digest_or_tag}")
    headers = {"Accept": MANIFEST_TYPE}
    answer = again(lambda: client.ask("GET", url, expect=(200,), headers=headers))
    digest = digest_of(answer.body)
    expected = reference.digest or answer.headers.get("docker-content-digest", digest)
    if expected != digest:
        raise RegistryError(
            f"{reference.host} gives a manifest with the digest {digest} for {reference}, expected "
            f"{expected}: it is another one, or damaged on the way"
        )
    return Resolved(digest=digest, pieces=pieces_in(answer.body, reference))


def pull(client: RegistryClient, resolved: Resolved, out: Path, report: Progress) -> None:
    """Fetch the bundle and check it; the file appears under its name whole or not at all.

    What has come stays as OUT.DIGITS.part, and the next pull goes on from there. Raises
    RegistryError, BundleError.
    """
    digits = resolved.digest.removeprefix("sha256:")[:12]
    part = out.with_name(f"{out.name}.{digits}{PART_SUFFIX}")
    try:
        with part.open("a+b") as file:
            present = _keep_good(file, resolved.pieces)
            start = sum(piece.size for piece in resolved.pieces[:present])
            for piece in resolved.pieces[present:]:
                share = _share_of(report, start, piece.size, resolved.bytes)
                Download(client, piece, file, start, share).run()
                start += piece.size
            os.fsync(file.fileno())
        check_bundle(part)
        part.replace(out)
        sync_folder(out.parent)
    except OSError as error:
        raise BundleError(f"cannot write {out}: {error.strerror}") from error


class Download:
    """One piece on its way down, to its place at the end of an open file."""

    def __init__(
        self,
        client: RegistryClient,
        piece: Descriptor,
        file: BinaryIO,
        place: int,
        report: Callable[[float], None],
    ) -> None:
        self._client = client
        self._piece = piece
        self._file = file
        self._place = place
        self._report = report

    def run(self) -> None:
        """Append the bytes that are missing. Raises RegistryError."""
        tries = 0
        while (before := self._received()) < self._piece.size:
            try:
                self._take(before)
            except CutError as error:
                tries = 0 if self._received() > before else tries + 1
                _pause(tries, error)
        if not _fits(self._file, self._place, self._piece):
            self._file.truncate(self._place)
            raise RegistryError(
                f"what {self._client.reference.host} gives as {self._piece.digest} has another "
                "hash: it is damaged there or on the way, pull it again"
            )

    def _received(self) -> int:
        self._file.flush()
        return os.fstat(self._file.fileno()).st_size - self._place

    def _take(self, start: int) -> None:
        """Take the bytes of one answer. Raises CutError: it ended early."""
        client, total = self._client, self._piece.size
        url = client.url(f"blobs/{self._piece.digest}")
        answer = client.open("GET", url, headers={"Range": f"bytes={start}-"} if start else {})
        try:
            if answer.status not in (200, 206):
                client.check(answer.status, answer.read(READ_BYTES), "GET", url, (200, 206))
            if answer.status == 200 and start:  # it knows no ranges
                self._file.truncate(self._place)
                start = 0
            content_range = answer.headers.get("Content-Range", "")
            if start and not content_range.startswith(f"bytes {start}-"):
                raise RegistryError(
                    f"{client.reference.host} gives the bytes {content_range!r} where those "
                    f"from {start} on were asked for"
                )
            while data := answer.read(READ_BYTES):
                start += len(data)
                if start > total:
                    raise RegistryError(
                        f"{client.reference.host} gives more than the {total} bytes of a piece"
                    )
                self._file.write(data)
                self._report(start / total)
        except (urllib3.exceptions.HTTPError, ConnectionError, TimeoutError) as error:
            raise CutError(str(error)) from error
        finally:
            answer.close()
        if start < total:
            raise CutError(f"the answer ended at {start} of {total} bytes")


def _keep_good(file: BinaryIO, pieces: Sequence[Descriptor]) -> int:
    """Return how many whole pieces a file begins with; cut off what cannot follow them.

    The next one may be there in part: it is checked once it is whole.
    """
    size, start = os.fstat(file.fileno()).st_size, 0
    for number, piece in enumerate(pieces):
        if start + piece.size > size:
            return number
        if not _fits(file, start, piece):
            file.truncate(start)
            return number
        start += piece.size
    file.truncate(start)
    return len(pieces)


def _fits(file: BinaryIO, start: int, piece: Descriptor) -> bool:
    """Whether a piece is at its place in a file."""
    digest, end = hashlib.sha256(), start + piece.size
    while start < end and (data := os.pread(file.fileno(), min(READ_BYTES, end - start), start)):
        digest.update(data)
        start += len(data)
    return start == end and f"sha256:{digest.hexdigest()}" == piece.digest


def _share_of(
    report: Progress, start: int, piece_bytes: int, total: int
) -> Callable[[float], None]:
    return lambda share: report("pull", (start + share * piece_bytes) / total)


def send(client: RegistryClient, blob: Descriptor, data: bytes) -> int:
    """Send a blob if the registry does not have it; return the bytes that were sent."""

    def send_once() -> int:
        # Also before another try: the answer may have been lost, and not the blob.
        if client.ask("HEAD", client.url(f"blobs/{blob.digest}"), expect=(200, 404)).status == 200:
            return 0
        url = client.url("blobs/uploads/")
        location = client.ask("POST", url, expect=(202,), body=b"").headers.get("location", "")
        if not location:
            raise RegistryError(
                f"{client.reference.host} does not say where to send a blob: is it a registry of "
                "the OCI?"
            )
        place = client.target("PUT", url, location)
        target = f"{place}{'&' if '?' in place else '?'}digest={blob.digest}"
        headers = {"Content-Type": "application/octet-stream"}
        client.ask("PUT", target, expect=(201,), headers=headers, body=data)
        return blob.size

    return again(send_once)


def again(run: Callable[[], T]) -> T:
    """Return what a request gives, tried again where it is cut. Raises RegistryError."""
    tries = 0
    while True:
        try:
            return run()
        except CutError as error:
            tries += 1
            _pause(tries, error)


def _pause(tries: int, error: CutError) -> None:
    """Wait before another try; RegistryError after too many."""
    if tries >= MAX_TRIES:
        raise RegistryError(
            f"the registry cannot be reached, {tries} tries failed; the last one: {error}"
        ) from error
    time.sleep(min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0**tries))
