"""Writes the files of a fleet's broker, and lets one that runs on this machine read them again."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from device.protocol.mqtt import LinkSettings
from toolkit.fleet.brokers.dynamic_security import disconnect_device, readmit_device
from toolkit.fleet.brokers.mosquitto import (
    NOBODY,
    BrokerFiles,
    DeviceAccess,
    Software,
    write_mosquitto,
)
from toolkit.fleet.brokers.nats import write_nats
from toolkit.fleet.brokers.rabbitmq import write_rabbitmq

RABBITMQCTL = Path("/usr/lib/rabbitmq/bin/rabbitmqctl")  # the wrapper changes the account
CONTROL_WAIT_S = 60.0
# Ends what users have open, on all nodes: `rabbitmqctl close_all_user_connections` of 3.10 leaves
# connections of MQTT as they are. The sixth field is the process of the connection.
END_CONNECTIONS = (
    "[exit(element(6, C), kill) || U <- [{users}], "
    "C <- rabbit_connection_tracking:list_of_user(U)]."
)


@dataclass(frozen=True, slots=True)
class BrokerSoftware:
    """A broker that a fleet may have.

    `reload` returns whether the broker runs here and was told; `disconnect` ends rights and
    connections of a device over MQTT, and returns why not; None: `reload` has. `readmit` ends the
    connections of a revoked device, takes back that it is denied, and returns why not; None:
    `reload` does. `keeps_accounts`: a
    device must be in its files before it connects. `run`: how to start it; `tell`: how to tell one
    that runs elsewhere; `cut`: what ends the connections of {device} there.
    """

    write: Callable[[BrokerFiles, DeviceAccess, Path | None], None]
    reload: Callable[[BrokerFiles, DeviceAccess], bool]
    disconnect: Callable[[LinkSettings, str], str] | None
    readmit: Callable[[LinkSettings, str], str] | None
    keeps_accounts: bool
    run: str
    tell: str
    cut: str


def reload_mosquitto(files: BrokerFiles, _roster: DeviceAccess = NOBODY) -> bool:
    """Let mosquitto read its files again; False if it does not run here, or as another account."""
    try:
        pid = int((files.folder / "mosquitto.pid").read_text())
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except (OSError, ValueError):
        return False
    if name != "mosquitto":
        return False
    try:
        os.kill(pid, signal.SIGHUP)
    except (ProcessLookupError, PermissionError):  # it has ended, or is another account's
        return False
    return True


def reload_rabbitmq(files: BrokerFiles, roster: DeviceAccess) -> bool:
    """Let RabbitMQ import its users again; False if no node of this fleet runs here."""
    folder = files.folder.resolve()
    if not _control(files, "import_definitions", str(folder / "definitions.json")):
        return False
    users = ",".join(f'<<"{device}">>' for device in roster.revoked)
    return not users or _control(files, "eval", END_CONNECTIONS.format(users=users))


def _control(files: BrokerFiles, *words: str) -> bool:
    """Run rabbitmqctl on the fleet's own node; whether it succeeded."""
    environment = {
        **os.environ,
        "RABBITMQ_CONF_ENV_FILE": str(files.folder.resolve() / "rabbitmq-env.conf"),
    }
    if not RABBITMQCTL.exists():
        return False
    try:
        done = subprocess.run(
            [RABBITMQCTL, *words], env=environment, capture_output=True, check=False,
            timeout=CONTROL_WAIT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


SOFTWARE: Mapping[Software, BrokerSoftware] = {
    "mosquitto": BrokerSoftware(
        write_mosquitto,
        reload_mosquitto,
        disconnect_device,
        readmit_device,
        keeps_accounts=False,
        run="mosquitto -c {folder}/mosquitto.conf",
        tell="copy {folder} and crl.pem to the broker and send it SIGHUP",
        cut="restart mosquitto with the configuration {folder}/mosquitto.conf: the devices connect "
        "again by themselves",
    ),
    "rabbitmq": BrokerSoftware(
        write_rabbitmq,
        reload_rabbitmq,
        None,
        None,
        keeps_accounts=True,
        run="RABBITMQ_CONF_ENV_FILE={folder}/rabbitmq-env.conf "
        "/usr/lib/rabbitmq/bin/rabbitmq-server",
        tell="copy {folder}/definitions.json and crl.pem to the broker, and there run `rabbitmqctl "
        "import_definitions definitions.json`",
        cut="there run `rabbitmqctl eval '" + END_CONNECTIONS.format(users='<<"{device}">>') + "'`",
    ),
    # nats-server 2.9.10 reads users again at SIGHUP, but clients that are connected then hear
    # nothing any more of what they have subscribed to with QoS 1.
    "nats": BrokerSoftware(
        write_nats,
        lambda _files, _roster: False,
        lambda _settings, _device: "NATS ends them when it starts again",
        None,
        keeps_accounts=True,
        run="nats-server -c {folder}/nats.conf",
        tell="copy {folder}/users.conf to the broker and start nats-server again: devices connect "
        "again by themselves",
        cut="start nats-server again",
    ),
}


def write_broker(
    files: BrokerFiles, roster: DeviceAccess = NOBODY, into: Path | None = None
) -> None:
    """Write the files of the broker; `into`: a folder that will take the place of the broker's."""
    SOFTWARE[files.software].write(files, roster, into)


def why_connected(
    files: BrokerFiles, settings: LinkSettings, device: str, *, broker_told: bool
) -> str:
    """End the rights and connections that a revoked device has; return why they are not ended.

    `settings`: how to connect with the server's certificate. `broker_told`: what `reload` returned.
    """
    end = SOFTWARE[files.software].disconnect
    if end is not None:
        return end(settings, device)
    return "" if broker_told else "the broker runs elsewhere"


def why_not_readmitted(
    files: BrokerFiles, settings: LinkSettings, roster: DeviceAccess, device: str
) -> str:
    """End what a revoked device has open, so that its id may be given again; return why not.

    `settings`: how to connect with the server's certificate.
    """
    software = SOFTWARE[files.software]
    if not software.reload(files, roster):  # its denial may be all that refuses the old certificate
        return "the broker runs elsewhere, or may not have the newest list of revoked certificates"
    return "" if software.readmit is None else software.readmit(settings, device)


def reload_broker(files: BrokerFiles, roster: DeviceAccess = NOBODY) -> bool:
    """Let the broker of this machine read its files again; False if it does not run here."""
    return SOFTWARE[files.software].reload(files, roster)
