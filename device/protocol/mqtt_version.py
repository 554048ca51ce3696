"""Finds out which MQTT a broker speaks, with the smallest CONNECT that there is.

A broker that knows only 3.1.1 should refuse MQTT 5 by its CONNACK. Some parse the rest of the
packet by the old rules first and then wait for bytes that never come (amqtt 0.12, when there is a
will). This CONNECT has no will, no name and no password, and reads the same by both rules.
"""

import contextlib
import socket
import ssl

from paho.mqtt.enums import MQTTProtocolVersion

PROBE_TIMEOUT_S = 5.0
# Fixed header, "MQTT", level 5, clean start, keep-alive 60 s, no properties, no client id.
_CONNECT = bytes((0x10, 13, 0, 4)) + b"MQTT" + bytes((5, 0x02, 0, 60, 0, 0, 0))
_DISCONNECT = bytes((0xE0, 0))
_CONNACK = 0x20

# agent.toml -> the version to use; None: ask the broker.
FIXED_VERSIONS: dict[str, MQTTProtocolVersion | None] = {
    "auto": None,
    "5": MQTTProtocolVersion.MQTTv5,
    "3.1.1": MQTTProtocolVersion.MQTTv311,
}
VERSION_NAMES = {MQTTProtocolVersion.MQTTv5: "5", MQTTProtocolVersion.MQTTv311: "3.1.1"}


def probe_version(
    host: str, port: int, context: ssl.SSLContext | None = None
) -> MQTTProtocolVersion:
    """Ask a broker, over TLS with a `context`; OSError if nothing can be reached there."""
    with _connect(host, port, context) as connection:
        answer = b""
        try:
            connection.sendall(_CONNECT)
            while len(answer) < 4 and (part := connection.recv(4 - len(answer))):
                answer += part
        except (TimeoutError, ConnectionError):
            pass  # the version that it does speak will show what is wrong
        version = version_of(answer)
        if version == MQTTProtocolVersion.MQTTv5:
            with contextlib.suppress(OSError):  # refused for another reason, and closed
                connection.sendall(_DISCONNECT)
    return version


def _connect(host: str, port: int, context: ssl.SSLContext | None) -> socket.socket:
    plain = socket.create_connection((host, port), PROBE_TIMEOUT_S)
    if context is None:
        return plain
    try:
        return context.wrap_socket(plain, server_hostname=host)
    except OSError:
        plain.close()
        raise


def version_of(connack: bytes) -> MQTTProtocolVersion:
    """Return the version by the first bytes of the answer.

    A CONNACK of MQTT 5 is longer than the two bytes of the old one, whatever it says.
    """
    speaks_5 = len(connack) == 4 and connack[0] == _CONNACK and connack[1] > 2
    return MQTTProtocolVersion.MQTTv5 if speaks_5 else MQTTProtocolVersion.MQTTv311
