"""The configuration of the fleet's broker, RabbitMQ 3.10 or later with its MQTT plugin.

RabbitMQ knows users by name alone, so each device that may connect is one, without a password: its
certificate's common name logs it in. The rights are those of mosquitto's access list, said as
regular expressions over routing keys, in which `/` is `.` and `+` is `*`.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography import x509

from device.protocol.topics import PREFIX, PROVISION
from toolkit.errors import FleetError
from toolkit.fleet.authority import CLAIM, OPERATOR, SERVER, read_certificate
from toolkit.fleet.brokers.mosquitto import (
    DEVICE_RIGHTS,
    MAX_MESSAGE_BYTES,
    SERVERS_OWN,
    BrokerFiles,
    DeviceAccess,
    write_contents,
)

PLUGINS = "[rabbitmq_mqtt,rabbitmq_auth_mechanism_ssl].\n"
NOTHING = "^$"
# Without a mirror a client could not subscribe again once the node of its queue is down.
MIRRORED = {
    "vhost": "/",
    "name": "mqtt-subscriptions",
    "pattern": "^mqtt-subscription-",
    "apply-to": "queues",
    "definition": {"ha-mode": "all", "ha-sync-mode": "automatic"},
    "priority": 0,
}
CONF = """\
# Made by `tandem fleet init`; run it with:
#   RABBITMQ_CONF_ENV_FILE={folder}/rabbitmq-env.conf /usr/lib/rabbitmq/bin/rabbitmq-server
listeners.tcp = none
mqtt.listeners.tcp = none
mqtt.listeners.ssl.1 = {port}
# Certificates: see advanced.config.

# A certificate's common name is the user; nobody has a password.
mqtt.ssl_cert_login = true
ssl_cert_login_from = common_name
mqtt.allow_anonymous = false
mqtt.vhost = /
mqtt.exchange = amq.topic
definitions.import_backend = local_filesystem
definitions.local.path = {folder}/definitions.json

# Retained documents survive a power cut, but for the last second, which is said again by all. Each
# node of a cluster keeps those that were published through it.
mqtt.retained_message_store = rabbit_mqtt_retained_msg_store_dets
mqtt.retained_message_store_dets_sync_interval = 1000
mqtt.subscription_ttl = 1209600000
# With Nagle's algorithm a download is 35 times slower.
mqtt.tcp_listen_options.nodelay = true
mqtt.prefetch = 20
max_message_size = {max_message_bytes}
log.connection.level = error
"""
# One list: rabbitmq.conf knows no revocation list. Each handshake reads that anew.
ADVANCED = """\
[{{rabbit, [{{ssl_options, [
  {{cacertfile, "{identity}/ca.crt"}},
  {{certfile, "{identity}/server.crt"}},
  {{keyfile, "{identity}/server.key"}},
  {{versions, ['tlsv1.3', 'tlsv1.2']}},
  {{verify, verify_peer}},
  {{fail_if_no_peer_cert, true}},
  {{crl_check, peer}},
  {{crl_cache, {{ssl_crl_hash_dir, {{internal, [{{dir, "{folder}/crl"}}]}}}}}}
]}}]}}].
"""
# The node's name is the fleet's own: `rabbitmqctl` never speaks to another broker of this machine.
ENVIRONMENT = """\
NODENAME={node}
CONFIG_FILE={folder}/rabbitmq.conf
ADVANCED_CONFIG_FILE={folder}/advanced.config
ENABLED_PLUGINS_FILE={folder}/enabled_plugins
MNESIA_BASE={folder}/data
LOG_BASE={folder}/log
"""


def write_rabbitmq(files: BrokerFiles, roster: DeviceAccess, into: Path | None = None) -> None:
    """Write all files of the broker; nothing is left half-written.

    `into`: a folder that will take the place of the broker's; the identity is beside it there.
    `crl/` has the revocation list under the name by which Erlang looks for it.
    """
    folder, identity = files.folder.resolve(), files.identity.resolve()
    ca = identity if into is None else into.parent / identity.name
    into = into or folder
    if re.search(r"[\s\"\\']", f"{folder}{identity}"):
        raise FleetError(
            f"{folder}: RabbitMQ takes no path with a space or a quote: choose another folder"
        )
    places = {"folder": folder, "identity": identity, "port": files.port}
    texts = {
        "rabbitmq.conf": CONF.format(**places, max_message_bytes=MAX_MESSAGE_BYTES),
        "advanced.config": ADVANCED.format(**places),
        "rabbitmq-env.conf": ENVIRONMENT.format(**places, node=node_name(files)),
        "enabled_plugins": PLUGINS,
        "definitions.json": definitions(roster),
    }
    contents = {name: text.encode() for name, text in texts.items()}
    link = into / "crl" / f"{subject_hash(read_certificate(ca / 'ca.crt'))}.r0"
    target = os.path.relpath(identity / "crl.pem", folder / "crl")
    write_contents(into, contents, ("data", "log", "crl"), ((link, target),))


def node_name(files: BrokerFiles) -> str:
    """Return the name of the fleet's node on this machine, without its host."""
    digest = hashlib.sha256(str(files.folder.resolve()).encode()).hexdigest()
    return f"tandem-{digest[:12]}"


def definitions(roster: DeviceAccess) -> str:
    """Return the users and their rights, as RabbitMQ imports them.

    An import changes users and takes none away: a revoked device stays, without any right.
    """
    topics_of: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
        SERVER: ((f"{PREFIX}/#", f"{PROVISION}/#"),) * 2,
        OPERATOR: ((f"{PREFIX}/#",),) * 2,
        CLAIM: ((f"{PROVISION}/+/response",), (f"{PROVISION}/+/request",)),
    }
    users, rights, topics = [], [], []
    for name, (read, write) in topics_of.items():
        users.append(_user(name))
        rights.append(_rights(name, "mqtt-subscription-.*"))
        denied = (SERVERS_OWN,) if name == OPERATOR else ()
        topics.append(_topics(name, _pattern(read), _pattern(write, denied)))
    read_own, write_own = _pattern(_own("read")), _pattern(_own("write"))
    for device in roster.admitted:
        users.append(_user(device))
        rights.append(_rights(device, _own_queues(device, roster.admitted)))
        topics.append(_topics(device, read_own, write_own))
    for device in roster.revoked:
        users.append(_user(device))
        rights.append(_rights(device, ""))
        topics.append(_topics(device, NOTHING, NOTHING))
    document = {
        "vhosts": [{"name": "/"}],
        "users": users,
        "permissions": rights,
        "topic_permissions": topics,
        "policies": [MIRRORED],
    }
    return json.dumps(document, separators=(",", ":"))


def _user(name: str) -> dict[str, object]:
    hashing = "rabbit_password_hashing_sha256"
    return {"name": name, "password_hash": "", "hashing_algorithm": hashing, "tags": []}


def _rights(name: str, queues: str) -> dict[str, str]:
    """Return the rights on queues and on the exchange of all topics. `queues`: a regular
    expression, empty for no right at all."""
    configure = f"^{queues}$"
    use = f"^(amq\\.topic|{queues})$" if queues else NOTHING
    return {"user": name, "vhost": "/", "configure": configure, "write": use, "read": use}


def _topics(name: str, read: str, write: str) -> dict[str, str]:
    return {"user": name, "vhost": "/", "exchange": "amq.topic", "read": read, "write": write}


def _own(right: str) -> tuple[str, ...]:
    """Return the topics of a device by `DEVICE_RIGHTS`; `%u` is its name."""
    return tuple(f"{PREFIX}/%u/{topic}" for granted, topic in DEVICE_RIGHTS if right in granted)


def _own_queues(device: str, devices: Sequence[str]) -> str:
    """Return the names of the queues of a device: those of clients with its name in their id.

    Another device cannot read a queue by taking this one's client id, not even one whose name
    begins as this one's does.
    """
    name = re.escape(device)
    clients = f"agent-{name}"
    # Of the device agent-x, as long as there is no x-1: tandem-agent-x-1 is the agent of that.
    agents = (f"agent-{row}" for row in devices) if device.startswith("agent-") else ()
    if not any(re.fullmatch(f"{name}-[0-9]+", agent) for agent in agents):
        clients += f"|{name}-[0-9]+"
    return f"mqtt-subscription-tandem-({clients})qos[01]"


def _pattern(filters: Sequence[str], denied: Sequence[str] = ()) -> str:
    """Return the regular expression of the routing keys, and of narrower filters, of MQTT's, but
    for those of the filters `denied`."""
    but = "".join(f"(?!{_expression(topic)}$)" for topic in denied)
    return f"^{but}({'|'.join(_expression(topic) for topic in filters)})$"


def _expression(topic: str) -> str:
    levels = {"%u": "{username}", "+": "[^.#]+", "#": ".*"}  # {username}: RabbitMQ puts it in
    return r"\.".join(levels.get(level, re.escape(level)) for level in topic.split("/"))


def subject_hash(certificate: x509.Certificate) -> str:
    """Return OpenSSL's hash of a certificate's subject: SHA-1 of its canonical encoding.

    In that, texts are UTF-8 in lower case with single spaces, and the outer sequence has no head.
    """
    encoded = b""
    for relative in certificate.subject.rdns:
        attributes = [
            _der(
                0x30,
                _oid(item.oid) + _der(0x0C, " ".join(str(item.value).lower().split()).encode()),
            )
            for item in relative
        ]
        encoded += _der(0x31, b"".join(sorted(attributes)))
    digest = hashlib.sha1(encoded, usedforsecurity=False).digest()
    return f"{int.from_bytes(digest[:4], 'little'):08x}"


def _oid(oid: x509.ObjectIdentifier) -> bytes:
    """Encode an attribute's identifier: those of names are below 2.5.4."""
    *head, last = (int(number) for number in oid.dotted_string.split("."))
    assert head == [2, 5, 4]
    assert last < 128
    return _der(0x06, bytes((0x55, 0x04, last)))


def _der(tag: int, content: bytes) -> bytes:
    """Return a DER value of fewer than 128 bytes: our names are that short."""
    assert len(content) < 128
    return bytes((tag, len(content))) + content
