"""`tandem flash`: bring a bundle to the board on the desk."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolkit.cli.command import FILE, argument, command, json_option, option, part
from toolkit.cli.failures import JsonErrors
from toolkit.cli.options.fleet import BoardLogin, BrokerLogin, signing_fleet_option


@dataclass(frozen=True, slots=True)
class Flash:
    """Bring BUNDLE to one board and wait until it is live there.

    Without --to the board is looked for on the USB network, by mDNS and at serial ports. Several
    boards are listed and none is flashed; --all-found flashes each.
    Only the chunks that the board lacks are sent. Ctrl-C leaves the board on its old release; what
    has arrived stays, and the next flash goes on there. Exit status 0: live, or it was already; 1:
    the board cannot be reached; 3: it refuses the bundle; 4: it rolled it back; 130: Ctrl-C.

    Example: tandem flash robot.bundle --to ssh://robot@192.168.55.1 --fleet robots/
    """

    bundle: Path | None = argument(required=False, type=FILE)
    address: str | None = option(
        "ssh://user@host, serial:///dev/ttyACM0?baud=921600, smp+udp://host, dir:///media/usb or "
        "mqtt://broker/device-id; default: the board that is found.", "--to", metavar="ADDRESS",
    )  # fmt: skip
    all_found: bool = option("Flash every board that is found, all at once.")
    search: BoardLogin = part()
    devices: tuple[str, ...] = option(
        "Device that may take a signed release from dir://. Repeatable.", "--device", metavar="ID"
    )
    fleet: Path | None = signing_fleet_option()
    erase_cache: bool = option("Delete the chunks of an earlier transfer.")
    slot: Literal["a", "b"] | None = option("Refuse unless this slot is the idle one.")
    no_commit: bool = option(
        "Leave the release on trial: `tandem flash --commit` keeps it, a restart goes back."
    )
    commit: bool = option("Keep the release on trial; takes no BUNDLE.")
    account: BrokerLogin = part()
    timeout_s: float = option(
        "Stop waiting for a device behind mqtt:// that is silent for this many seconds.",
        "--timeout", min=0.1, default=120.0,
    )  # fmt: skip
    as_json: bool = json_option("Print the board and the result as JSON.")


flash = command(Flash, "flash:flash", cls=JsonErrors)  # fmt: skip
