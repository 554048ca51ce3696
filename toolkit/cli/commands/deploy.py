"""`tandem deploy`: send a bundle to devices and wait until it runs there."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.cli.command import FILE, FOLDER, argument, command, json_option, option, part
from toolkit.cli.options.fleet import BrokerLogin, signing_fleet_option


@dataclass(frozen=True, slots=True)
class Deploy:
    """Deploy BUNDLE to one or more devices and wait until it is live on all.

    Each device downloads what it lacks, starts the release on trial, and rolls back by itself if it
    fails. It remembers that, and takes the same bundle again only with --retry. Exit status 0 only
    if the release is live on every device.

    Example: tandem deploy person.bundle --device board-1 --device board-2 --broker
    192.168.1.10:1883
    """

    bundle: Path = argument(type=FILE)
    devices: tuple[str, ...] = option(
        "A device's id in agent.toml. Repeatable.", "--device", required=True, metavar="ID"
    )
    broker: str | None = option("The MQTT broker.  [default: that of --fleet]", metavar="HOST:PORT")
    fleet: Path | None = signing_fleet_option()
    earlier: Path | None = option(
        "A folder with earlier bundles: a device that runs one of them gets the differences from "
        "it alone. Those of --fleet are found without.", type=FOLDER,
    )  # fmt: skip
    login: BrokerLogin = part()
    timeout_s: float = option(
        "Stop waiting for a device that is silent for this many seconds.",
        "--timeout", min=0.1, default=120.0,
    )  # fmt: skip
    retry: bool = option("Try the release also where it was rolled back before.")
    as_json: bool = json_option("Print a line of JSON for each device.")


deploy = command(Deploy, "deploy:deploy")  # fmt: skip
