"""The configuration of the fleet's broker, mosquitto.

A device's common name is its user name, and the access list lets it read and write its own tree
alone. mosquitto's defaults are not safe for a fleet: it would lose retained documents in a power
cut, and Nagle's algorithm would cost a factor of 35 in downloads.
"""

import os
import pwd
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from device.files import make_folder, replace_file
from device.protocol.topics import PREFIX, PROVISION
from toolkit.errors import FleetError
from toolkit.fleet.authority import CLAIM, OPERATOR, SERVER
from toolkit.fleet.brokers.dynamic_security import CONTROL, plugin_state

MAX_MESSAGE_BYTES = 1024 * 1024 + 4096  # an index has 1 MiB
MAX_QUEUED = 1000  # messages a client that is away may leave behind
Software = Literal["mosquitto", "rabbitmq", "nats"]
SERVERS_OWN = f"{PREFIX}/~server/#"  # the operator may not speak for a server

# Topic below fleet/v1/DEVICE/ -> what the device may do there. Everything else is denied.
DEVICE_RIGHTS: tuple[tuple[str, str], ...] = (
    ("read", "desired"),
    ("readwrite", "state"),  # it looks for another agent with its id
    ("write", "reported"),
    ("write", "blob/get"),
    ("read", "blob/+/#"),
    ("write", "tuf/get"),
    ("read", "tuf/reply/#"),
    ("readwrite", "cmd/#"),  # answered in place
    ("write", "evt/#"),
    ("write", "tele/#"),
    ("write", "log/#"),
    # The pipeline's: of several cameras each has its own level.
    ("write", "status"),
    ("write", "stats"),
    ("write", "reload"),
    ("write", "detections"),
    ("write", "+/detections"),
    ("write", "events"),
    ("write", "+/events"),
    ("read", "detect/set"),
    ("read", "+/detect/set"),
    ("write", "detect/state"),
    ("write", "+/detect/state"),
    ("read", "threshold/set"),
    ("read", "+/threshold/set"),
    ("write", "threshold/state"),
    ("write", "+/threshold/state"),
)

MOSQUITTO = """\
# Made by `tandem fleet init`; run it with: mosquitto -c {folder}/mosquitto.conf
# After a change of certificates, crl.pem or acl it is told to read them: kill -HUP its process.
# Started by root it goes on as the account whose these files are, and can write to this folder.
user {user}
listener {port}
cafile {identity}/ca.crt
certfile {identity}/server.crt
keyfile {identity}/server.key
crlfile {identity}/crl.pem
tls_version tlsv1.2
require_certificate true
use_identity_as_username true
allow_anonymous false
acl_file {folder}/acl
pid_file {folder}/mosquitto.pid

# Retained documents survive a power cut, but for the last second, which is said again by all:
# by default they are written every 30 minutes. Writing at each change takes 100 devices/s at most.
persistence true
persistence_location {folder}/data/
autosave_interval 1
autosave_on_changes false
persistent_client_expiration 14d

# With Nagle's algorithm a download is 35 times slower.
set_tcp_nodelay true
message_size_limit {max_message_bytes}
max_queued_messages {max_queued}
max_inflight_messages 20

# Who connects from where, by the name in the certificate.
connection_messages true

# Knows revoked devices alone: it denies them everything, and ends the connections that are open.
plugin mosquitto_dynamic_security.so
plugin_opt_config_file {folder}/dynamic-security.json
"""


@dataclass(frozen=True, slots=True)
class BrokerFiles:
    """Where the broker's files are: `folder` for its own, `identity` for certificates."""

    folder: Path
    identity: Path
    port: int
    software: Software = "mosquitto"


@dataclass(frozen=True, slots=True)
class DeviceAccess:
    """Which devices may connect, and which may do nothing any more. mosquitto needs to know the
    revoked ones alone."""

    admitted: tuple[str, ...] = ()
    revoked: tuple[str, ...] = ()


NOBODY = DeviceAccess()


def acl_text(revoked: Sequence[str] = ()) -> str:
    """Return mosquitto's access list. `revoked`: devices that may do nothing any more."""
    lines = [
        "# Made by tandem. A device reads and writes its own tree alone: %u is the common name of",
        "# its certificate. Everything that is not named is denied.",
        *(f"pattern {right} {PREFIX}/%u/{topic}" for right, topic in DEVICE_RIGHTS),
        "",
        f"user {SERVER}",
        f"topic readwrite {PREFIX}/#",
        f"topic readwrite {PROVISION}/#",
        f"topic readwrite {CONTROL}/#",
        "",
        f"user {OPERATOR}",
        f"topic readwrite {PREFIX}/#",
        f"topic deny {SERVERS_OWN}",
        "",
        f"user {CLAIM}",
        f"topic write {PROVISION}/+/request",
        f"topic read {PROVISION}/+/response",
        # The patterns are everybody's: without these it could fetch releases in its own name.
        f"topic deny {PREFIX}/#",
    ]
    for device in revoked:
        lines += ["", f"user {device}", f"topic deny {PREFIX}/#"]
    return "\n".join(lines) + "\n"


def write_mosquitto(
    files: BrokerFiles, roster: DeviceAccess = NOBODY, into: Path | None = None
) -> None:
    """Write mosquitto.conf and acl; nothing is left half-written.

    `into`: a folder that will take the place of the broker's.
    """
    folder = files.folder.resolve()
    into = into or folder
    identity = files.identity.resolve()
    if any(character.isspace() for character in f"{folder}{identity}"):
        raise FleetError(f"{folder}: mosquitto takes no path with a space: choose another folder")
    conf = MOSQUITTO.format(
        folder=folder,
        identity=identity,
        port=files.port,
        user=_account(folder),
        max_message_bytes=MAX_MESSAGE_BYTES,
        max_queued=MAX_QUEUED,
    )
    contents = {
        "mosquitto.conf": conf.encode(),
        "acl": acl_text(roster.revoked).encode(),
        "dynamic-security.json": plugin_state(roster.revoked),
    }
    write_contents(into, contents)


def write_contents(
    into: Path,
    contents: Mapping[str, bytes],
    folders: Sequence[str] = ("data",),
    links: Sequence[tuple[Path, str]] = (),
) -> None:
    """Make folders of a broker, its files by name, and links that lack. Raises FleetError."""
    try:
        for name in folders:
            make_folder(into / name)
        for name, content in contents.items():
            replace_file(into / name, content)
        for link, target in links:
            if not link.is_symlink():
                link.symlink_to(target)
    except OSError as error:
        raise FleetError(
            f"cannot write the files of the broker in {into}: {error.strerror}"
        ) from error


def _account(folder: Path) -> str:
    """Return the name of the account whose a folder is, or will be."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        return there.owner() if there == folder else pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # an account without a name: mosquitto takes none else
        return "mosquitto"
