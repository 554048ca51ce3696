"""One board of the line: set up, given its release, and checked to be the one of its row."""

import contextlib
import shlex
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

import click

from toolkit.errors import BoardError
from toolkit.fleet.boards.init import InitSettings, set_up
from toolkit.fleet.boards.probe import Probe
from toolkit.fleet.boards.provision_table import LineRow, Provisioned
from toolkit.fleet.boards.request import InitRequest
from toolkit.fleet.boards.shell import AskPassword, Shell
from toolkit.fleet.boards.trust import CERTIFICATE
from toolkit.fleet.transports.addresses import Address, open_board, parse_address
from toolkit.fleet.transports.delivery import Delivery
from toolkit.fleet.transports.flash_board import flash_board

SERIAL_FILE = "/proc/device-tree/serial-number"
LOOK_S = 2.0


@dataclass(slots=True)
class Station:
    """What is the same for all boards of the line. `wait_s`: for the board of a row to come."""

    settings: InitSettings
    broker: str
    fleet: Path | None
    dev: bool
    smp_device: str
    profile: str
    bundle: Path | None
    default_address: str
    ssh_config: str
    wait_s: float
    ask_password: AskPassword
    lock: threading.Lock = field(default_factory=threading.Lock)

    def provision(self, row: LineRow) -> Provisioned:
        """Set the board of a row up, and flash it; TandemError says why not."""
        address = self._address(row)
        shell = Shell(address, self.ask_password)
        try:
            self._wait_for(shell, row)
            with tempfile.TemporaryDirectory() as work:
                set_up(
                    shell,
                    self._request(row),
                    self.settings,
                    Path(work),
                    dry_run=False,
                    on_step=lambda _step: None,
                    on_probe=lambda probe: check_serial(probe, row),
                )
            name, sha256 = "", ""
            if self.bundle is not None:
                name, sha256 = self._flash(address, self.bundle)
            certificate = _certificate_number(shell)
        finally:
            shell.close()
        return Provisioned(certificate, name, sha256, address.text)

    def _address(self, row: LineRow) -> Address:
        text = row.address or self.default_address
        text = text if "://" in text else f"ssh://{text}"
        if self.ssh_config and "ssh_config=" not in text:
            query = urlencode({"ssh_config": self.ssh_config}, safe="/")
            text = f"{text}{'&' if '?' in text else '?'}{query}"
        try:
            return parse_address(text)
        except click.UsageError as error:
            raise BoardError(f"the address of {row.serial}: {error.message}") from error

    def _request(self, row: LineRow) -> InitRequest:
        return InitRequest(
            device=row.device,
            profile=row.profile or self.profile,
            broker=self.broker,
            fleet=self.fleet,
            dev=self.dev,
            labels=row.labels,
            smp_device=self.smp_device,
        )

    def _wait_for(self, shell: Shell, row: LineRow) -> None:
        """Wait until the board of a row is at its address; BoardError: another one, or none, is."""
        until_s = time.monotonic() + self.wait_s
        while True:
            try:
                serial = shell.run(f"tr -d '\\0' < {shlex.quote(SERIAL_FILE)}").text
                if not serial or serial == row.serial:
                    return
                error = _wrong_board(row, serial)
            except BoardError as unreachable:
                error = unreachable
            if time.monotonic() >= until_s:
                raise error
            shell.forget_connection()
            time.sleep(LOOK_S)

    def _flash(self, address: Address, bundle: Path) -> tuple[str, str]:
        """Bring the bundle; return its name with the version, and its SHA-256."""
        with contextlib.closing(Delivery(bundle, self.fleet)) as delivery:
            with self.lock:  # one at a time writes into the fleet's folder
                delivery.metadata()
            with contextlib.closing(open_board(address)) as board:
                flashed = flash_board(
                    board,
                    address.text,
                    delivery,
                    on_facts=lambda _facts: None,
                    on_progress=lambda _state: None,
                )
        return f"{flashed.name} {flashed.version}", flashed.sha256


def check_serial(probe: Probe, row: LineRow) -> None:
    """Refuse a board whose module has another serial number than its row."""
    if probe.serial and probe.serial != row.serial:
        raise _wrong_board(row, probe.serial)


def _wrong_board(row: LineRow, serial: str) -> BoardError:
    return BoardError(
        f"the board there has the serial number {serial}, its row has {row.serial}: connect the "
        "right one, or correct the row"
    )


def _certificate_number(shell: Shell) -> str:
    """Return the serial number of the board's certificate, "" without one."""
    from cryptography import x509

    done = shell.as_root(f"cat {CERTIFICATE} 2>/dev/null")
    if done.status != 0:
        return ""
    return f"{x509.load_pem_x509_certificate(done.stdout).serial_number:x}"
