"""A stick or a share: all that a board needs, for `tandem-agent control install FOLDER`."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from device.control.upload_request import DESIRED, REPOSITORY
from device.files import make_folder, sync_folder, write_synced
from device.protocol.control import Answer
from device.protocol.documents import Measured, Update
from toolkit.fleet.transports.delivery import Delivery
from toolkit.fleet.transports.transport import (
    OnProgress,
    Progress,
    RefusedError,
    TransportError,
)


class FolderBoard:
    """A folder for one or more devices. Nobody answers: the boards judge when they install."""

    sent_bytes = 0
    measured: Measured | None = None
    shared = False

    def __init__(self, folder: Path, devices: Sequence[str]) -> None:
        self.name = str(folder)
        self._folder = folder
        self._devices = tuple(devices)

    def facts(self) -> None:
        """Nobody answers."""

    def send(self, delivery: Delivery, on_progress: OnProgress) -> None:
        """Write what the folder lacks; a bundle that is there whole is not written again."""
        if delivery.signed and not self._devices:
            raise RefusedError(
                "a signed release is for a device by its name: name each that shall take it from "
                f"{self._folder} with `tandem flash --device`"
            )
        files = delivery.files(*self._devices)
        if not self._folder.is_dir():
            raise TransportError(f"{self._folder} is no folder: is the stick there, and mounted?")
        try:
            self._write_bundle(delivery, on_progress)
            for old in (DESIRED, "desired", REPOSITORY):
                _remove(self._folder / old)
            for name, content in files.items():
                path = self._folder / name
                make_folder(path.parent)
                write_synced(path, [content])
            sync_folder(self._folder)
        except OSError as error:
            raise TransportError(f"cannot write to {self._folder}: {error.strerror}") from error

    def install(self, delivery: Delivery, on_progress: OnProgress) -> Update:
        """A folder installs nothing; its boards do, by `tandem-agent control install`."""
        raise RefusedError(
            f"{self._folder} is a folder: `tandem-agent control install` on the board takes what "
            "is there"
        )

    def cancel(self, request: str) -> None:
        """Nothing runs there."""

    def commit(self) -> Answer:
        """A folder commits nothing."""
        raise RefusedError(
            f"{self._folder} is a folder: `tandem-agent control commit` on the board keeps what it "
            "tries"
        )

    def close(self) -> None:
        """There is nothing to end."""

    def _write_bundle(self, delivery: Delivery, on_progress: OnProgress) -> None:
        """Copy the bundle chunk by chunk over what is there."""
        blob, done_bytes = delivery.blob, 0
        path = self._folder / f"{blob.spec.sha256}.bundle"
        if delivery.erase:
            path.unlink(missing_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(handle, blob.spec.bytes)
            for number in range(blob.table.count):
                start, size = blob.table.starts[number], blob.table.size(number)
                if not blob.table.fits(number, os.pread(handle, size, start)):
                    os.pwrite(handle, blob.read(number), start)
                    self.sent_bytes += size
                done_bytes += size
                on_progress(Progress("sending", done_bytes, blob.spec.bytes))
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
