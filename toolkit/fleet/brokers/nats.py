"""The configuration of the fleet's broker, nats-server 2.9 or later, which speaks MQTT 3.1.1.

NATS knows users by name, so each device that may connect is one, without a password: its
certificate's subject logs it in, over MQTT alone. The rights are those of mosquitto's access list,
said as subjects, in which `/` is `.`, `+` is `*` and `#` is `>`. NATS reads no revocation list: a
revoked device is no user any more.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from device.protocol.topics import PREFIX, PROVISION
from toolkit.errors import FleetError
from toolkit.fleet.authority import CLAIM, OPERATOR, SERVER
from toolkit.fleet.brokers.mosquitto import (
    DEVICE_RIGHTS,
    MAX_MESSAGE_BYTES,
    SERVERS_OWN,
    BrokerFiles,
    DeviceAccess,
    write_contents,
)

CONF = """\
# Made by `tandem fleet init`; run it with: nats-server -c {folder}/nats.conf
# After a change of users.conf start it again; after SIGHUP alone, clients that are connected hear
# nothing more. It checks no revocation list: who may connect is in users.conf alone.
server_name: fleet
max_payload: {max_message_bytes}
# Sessions and retained documents, which NATS brings to the disk every two minutes: after a power
# cut all say again what is missing.
jetstream {{ store_dir: "{folder}/data" }}
# The port of NATS's own protocol cannot be left out: any free one, which lets no user in.
host: "127.0.0.1"
port: -1
tls {tls}
mqtt {{
  port: {port}
  tls {tls}
}}
include "users.conf"
"""
TLS = """{{
    cert_file: "{identity}/server.crt"
    key_file: "{identity}/server.key"
    ca_file: "{identity}/ca.crt"
    verify_and_map: true
    timeout: 5
  }}"""
SESSIONS = "$MQTT.sub.>"  # where NATS puts what a client has subscribed to with QoS 1


def write_nats(files: BrokerFiles, roster: DeviceAccess, into: Path | None = None) -> None:
    """Write nats.conf and users.conf; nothing is left half-written.

    `into`: a folder that will take the place of the broker's.
    """
    folder, identity = files.folder.resolve(), files.identity.resolve()
    into = into or folder
    if any(character in f"{folder}{identity}" for character in '"\\\n'):
        raise FleetError(f"{folder}: NATS takes no path with a quote: choose another folder")
    tls = TLS.format(identity=identity)
    conf = CONF.format(folder=folder, port=files.port, max_message_bytes=MAX_MESSAGE_BYTES, tls=tls)
    contents = {"nats.conf": conf.encode(), "users.conf": users_text(roster).encode()}
    write_contents(into, contents)


def users_text(roster: DeviceAccess) -> str:
    """Return the users and their rights, a user a line."""
    every = (f"{PREFIX}/#",)
    rows = [
        _user(SERVER, (*every, f"{PROVISION}/#"), (*every, f"{PROVISION}/#")),
        _user(OPERATOR, every, every, denied=(SERVERS_OWN,)),
        _user(CLAIM, (f"{PROVISION}/+/response",), (f"{PROVISION}/+/request",)),
        *(_user(name, _own(name, "read"), _own(name, "write")) for name in roster.admitted),
    ]
    return "authorization {\n  users = [\n" + "".join(f"    {row}\n" for row in rows) + "  ]\n}\n"


def _own(device: str, right: str) -> list[str]:
    return [f"{PREFIX}/{device}/{topic}" for granted, topic in DEVICE_RIGHTS if right in granted]


def _user(name: str, read: Sequence[str], write: Sequence[str], denied: Sequence[str] = ()) -> str:
    return json.dumps(
        {
            "user": f"CN={name}",
            "allowed_connection_types": ["MQTT"],
            "permissions": {
                "publish": {"allow": [*_subjects(write)], "deny": [*_subjects(denied)]},
                "subscribe": [*_subjects(read), SESSIONS],
            },
        }
    )


def _subjects(filters: Sequence[str]) -> Iterator[str]:
    for topic in filters:
        subject = topic.replace("/", ".").replace("+", "*")
        if subject.endswith("#"):
            yield subject[:-2]  # in MQTT `a/#` is `a`, too
        yield subject.replace("#", ">")
