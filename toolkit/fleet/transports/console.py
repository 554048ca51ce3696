"""A board whose agent does not serve the serial line: through its login shell, by ZMODEM.

Two files go there: the bundle, and an installer in one file, which has the desired document and
the signed metadata in it, compares the bundle with its SHA-256 and hands both to the agent.
"""

import base64
import io
import shlex
import tarfile
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from device.control.upload_request import BoardFacts
from device.protocol.control import Answer
from device.protocol.documents import Measured, Update
from toolkit.fleet.transports.addresses import Address
from toolkit.fleet.transports.delivery import Delivery
from toolkit.fleet.transports.flash_board import await_result
from toolkit.fleet.transports.login_shell import Ask, Shell
from toolkit.fleet.transports.ssh import AGENT, CONFIG, updates_in
from toolkit.fleet.transports.transport import (
    OnProgress,
    Progress,
    RefusedError,
    TransportError,
)

FOLDER = "tandem-install"  # in the home of the user
INSTALLER = "install.sh"
INSTALL_S = 900.0  # a board may build segments with TensorRT meanwhile
MISSING = 127  # exit status of a shell: there is no such program
SCRIPT = """#!/bin/sh
# Installs the bundle beside this file: sh {installer}
cd "$(dirname "$0")" || exit 1
if ! echo "{sha256}  {sha256}.bundle" | sha256sum -c - >/dev/null 2>&1; then
    echo "tandem-agent: {sha256}.bundle is not whole: send it again" >&2
    exit 2
fi
sed '1,/^__FILES__$/d' "$(basename "$0")" | base64 -d | tar -xf - || exit 1
exec {control} install "$PWD"
__FILES__
"""


class ConsoleBoard:
    """The board behind a login shell."""

    sent_bytes = 0
    measured: Measured | None = None
    shared = False

    def __init__(self, address: Address, device: str, baud: int, ask: Ask) -> None:
        self.name = device
        self._baud, self._ask = baud, ask
        self._user = address.options.get("user", "")
        agent, config = address.options.get("agent", AGENT), address.options.get("config", CONFIG)
        self._agent = agent
        self._control = shlex.join((agent, "control", "--config", config))
        self._device = address.devices[0] if address.devices else ""
        self._shell: Shell | None = None

    def facts(self) -> BoardFacts | None:
        """Return what the board is; None: it has no agent."""
        status, lines = self._open().run(f"{self._control} facts 2>&1")
        if status == MISSING:
            return None
        try:
            facts = msgspec.json.decode(lines[-1], type=BoardFacts)
        except (IndexError, ValueError) as error:
            raise TransportError(f"{self.name}: {lines[-1] if lines else 'no answer'}") from error
        self._device = facts.answer.device
        return facts

    def send(self, delivery: Delivery, on_progress: OnProgress) -> None:
        """Send both files whole, and compare the bundle with its SHA-256."""
        if delivery.signed and not self._device:
            raise RefusedError(
                f"the board behind {self.name} has no agent that says who it is: name it with "
                "--device, so that the release can be signed for it"
            )
        shell = self._open()
        if shell.run("command -v rz")[0]:
            raise RefusedError(
                f"rz is missing on the board behind {self.name}: `apt-get install lrzsz` there"
            )
        erase = f"rm -rf ~/{FOLDER}; " if delivery.erase else ""
        shell.run(f"{erase}mkdir -p ~/{FOLDER}; rm -f ~/{FOLDER}/{INSTALLER}")
        spec, device = delivery.blob.spec, self._device
        sent: dict[str, int] = {}

        def show(name: str, sent_bytes: int) -> None:
            sent[name] = sent_bytes
            self.sent_bytes = sum(sent.values())
            on_progress(Progress("sending", min(spec.bytes, self.sent_bytes), spec.bytes))

        with tempfile.TemporaryDirectory() as folder:
            bundle, script = Path(folder) / f"{spec.sha256}.bundle", Path(folder) / INSTALLER
            bundle.symlink_to(delivery.bundle.resolve())
            script.write_bytes(installer(delivery, device, self._control))
            for path in (bundle, script):
                shell.send(path, f"~/{FOLDER}", partial(show, path.name))
        status, lines = shell.run(f"sha256sum ~/{FOLDER}/{spec.sha256}.bundle", INSTALL_S)
        if status or not lines or not lines[0].startswith(spec.sha256):
            shell.run(f"rm -f ~/{FOLDER}/{spec.sha256}.bundle")
            raise TransportError(
                f"what arrived behind {self.name} has another SHA-256: flash again"
            )

    def install(self, delivery: Delivery, on_progress: OnProgress) -> Update:
        """Run the installer."""
        shell = self._open()
        updates = updates_in(self._installed(shell), self)
        update = await_result(updates, self, delivery, on_progress)
        shell.run(f"cd; rm -rf ~/{FOLDER}")
        return update

    def cancel(self, request: str) -> None:
        """End the installer and its update."""
        shell = self._open()
        shell.interrupt()
        shell.run(f"{self._control} cancel {request}")

    def commit(self) -> Answer:
        """Keep the release on trial."""
        status, lines = self._open().run(f"{self._control} commit 2>&1")
        if status:
            raise RefusedError(f"{self.name}: {lines[-1] if lines else f'exit status {status}'}")
        return msgspec.json.decode(lines[-1], type=Answer)

    def close(self) -> None:
        """Log out."""
        if self._shell is not None:
            self._shell.close()
            self._shell = None

    def _open(self) -> Shell:
        if self._shell is None:
            self._shell = Shell(self.name, self._baud, self._ask)
            self._shell.log_in(self._user)
        return self._shell

    def _installed(self, shell: Shell) -> Iterator[bytes]:
        """Yield the lines of the installer; TransportError if it says why it cannot."""
        for line in shell.lines(f"sh ~/{FOLDER}/{INSTALLER} 2>&1", INSTALL_S):
            if isinstance(line, int):
                return
            if line.startswith(b"tandem-agent: "):
                raise RefusedError(f"{self.name}: {line.decode(errors='replace')[14:]}")
            yield line


def installer(delivery: Delivery, device: str, control: str) -> bytes:
    """Return a script of the shell that installs the bundle which lies beside it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, content in delivery.files(*filter(None, (device,))).items():
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    script = SCRIPT.format(installer=INSTALLER, sha256=delivery.blob.spec.sha256, control=control)
    return script.encode() + base64.encodebytes(packed.getvalue())
