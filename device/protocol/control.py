"""What a program on the board and the running agent say to each other over a Unix socket.

Each side writes lines of JSON: a request, then its answer; a connection may carry several. The
agent alone owns the slots: whoever has brought a bundle onto the board's disk (over SSH, a serial
line, a USB stick) hands it over with `Install`.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Union

import msgspec

from device.protocol.documents import Reported, Text

SOCKET = "control.sock"  # in the state folder
MAX_LINE_BYTES = 1024 * 1024


class _Ask(msgspec.Struct, frozen=True, kw_only=True, tag_field="op"):
    """Base of the requests; the tag is kept in `op`."""


class AskProgress(_Ask, frozen=True, kw_only=True, tag="progress"):
    """Asks for the slots and the report."""


class Install(_Ask, frozen=True, kw_only=True, tag="install"):
    """Asks for the release of a desired document, signed or not, as it comes over MQTT.

    `bundle`: the whole path of its file, or of a folder with it; empty: it is fetched as agent.toml
    says. `repository`: a folder with the signed metadata; empty: those of agent.toml.
    """

    desired: str
    bundle: str = ""
    repository: str = ""


class Cancel(_Ask, frozen=True, kw_only=True, tag="cancel"):
    """Ends the update of this request, unless it is live."""

    request: str


class Rollback(_Ask, frozen=True, kw_only=True, tag="rollback"):
    """Goes back to the release in the other slot, or ends a trial."""


class Commit(_Ask, frozen=True, kw_only=True, tag="commit"):
    """Keeps a release on trial that waits for that (`InstallPolicy.manual`)."""


class SwitchAgent(_Ask, frozen=True, kw_only=True, tag="switch_agent"):
    """Lets the agent end, so that another version of it is tried (`device.update.agent_versions`).

    `environment`: its name below the state folder. `limit_s`: so long it may take to bring back
    MQTT and the pipeline, where they work now.
    """

    environment: str
    limit_s: float


Ask = Union[AskProgress, Install, Cancel, Rollback, Commit, SwitchAgent]  # noqa: UP007  (read by msgspec on 3.10)


class SlotRow(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a slot. `role`: "active", "trial" or "idle"."""

    slot: str
    role: str
    sha256: Text
    name: Text
    version: Text
    bytes: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to every request; `error` says why it was not done, empty if it was."""

    error: str = ""
    device: str = ""
    min_version: str = ""
    slots: tuple[SlotRow, ...] = ()
    reported: Reported | None = None


@contextmanager
def socket_address(folder: Path, name: str = SOCKET) -> Iterator[str]:
    """Yield an address of a socket in a folder that is short, however long the path is.

    Raises OSError.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{name}"
    finally:
        os.close(handle)


def listen(folder: Path, name: str = SOCKET, *, backlog: int = 1) -> socket.socket:
    """Return a socket that listens in a folder, for its owner alone; what an earlier process left
    there is replaced. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket_address(folder, name) as address:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address)  # of a process that was killed
            mask = os.umask(0o177)
            try:
                listener.bind(address)
            finally:
                os.umask(mask)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def connect(folder: Path, timeout_s: float) -> socket.socket:
    """Return a connection to the agent whose state folder this is. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        with socket_address(folder) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection
