"""A stick or a share: all that a board needs, for `tandem-agent control install FOLDER`."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from device.control.upload_request import DESIRED, DESIRED_OF, REPOSITORY
from device.files import make_folder, sync_folder, write_synced
from device.protocol.control import Answer
from toolkit.fleet.transports.delivery import Delivery
from toolkit.fleet.transports.transport import (
    Delivered,
    OnProgress,
    Progress,
    RefusedError,
    TransportError,
)


class FolderBoard:
    """A folder for one or more devices. Nobody answers: the boards judge when they install."""

    def __init__(self, folder: Path, devices: Sequence[str]) -> None:
        self.name = str(folder)
        self._folder = folder
        self._devices = tuple(devices)

    def facts(self) -> None:
        """Nobody answers."""

    def deliver(self, delivery: Delivery, on_progress: OnProgress) -> Delivered:
        """Write what the folder lacks; a bundle that is there whole is not written again."""
        if delivery.signed and not self._devices:
            raise RefusedError(
                "a signed release is for a device by its name: name each that shall take it from "
                f"{self._folder} with `tandem flash --device`"
            )
        names = [DESIRED_OF.format(device=device) for device in self._devices] or [DESIRED]
        owners = self._devices or ("",)
        documents = {
            name: delivery.desired(device) for name, device in zip(names, owners, strict=True)
        }
        if not self._folder.is_dir():
            raise TransportError(f"{self._folder} is no folder: is the stick there, and mounted?")
        try:
            sent_bytes = self._write_bundle(delivery, on_progress)
            for old in (DESIRED, "desired", REPOSITORY):
                _remove(self._folder / old)
            for name, content in {**delivery.metadata(), **documents}.items():
                path = self._folder / name
                make_folder(path.parent)
                write_synced(path, [content])
            sync_folder(self._folder)
        except OSError as error:
            raise TransportError(f"cannot write to {self._folder}: {error.strerror}") from error
        return Delivered(sent_bytes)

    def commit(self) -> Answer:
        """A folder commits nothing."""
        raise RefusedError(
            f"{self._folder} is a folder: `tandem-agent control commit` on the board keeps what it "
            "tries"
        )

    def close(self) -> None:
        """There is nothing to end."""

    def _write_bundle(self, delivery: Delivery, on_progress: OnProgress) -> int:
        """Copy the bundle chunk by chunk over what is there; return the bytes written."""
        blob, sent_bytes, present_bytes = delivery.blob, 0, 0
        path = self._folder / f"{blob.spec.sha256}.bundle"
        if delivery.erase:
            path.unlink(missing_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(handle, blob.spec.bytes)
            for number in range(blob.table.count):
                start, size = blob.table.starts[number], blob.table.size(number)
                if blob.table.fits(number, os.pread(handle, size, start)):
                    present_bytes += size
                else:
                    os.pwrite(handle, blob.read(number), start)
                    sent_bytes += size
                done_bytes = present_bytes + sent_bytes
                on_progress(Progress("sending", done_bytes, blob.spec.bytes))
            os.fsync(handle)
        finally:
            os.close(handle)
        return sent_bytes


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
