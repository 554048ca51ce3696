"""Where a broker is, and how a program of the fleet logs in there."""

from dataclasses import dataclass, field

from device.errors import BrokerError
from device.protocol.mqtt import LinkSettings
from device.protocol.tls import TlsFiles

DEFAULT_PORT, TLS_PORT = 1883, 8883


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Where the broker is and how to log in; the password is not in its repr."""

    host: str
    port: int = DEFAULT_PORT
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None

    def link_settings(self, client_id: str, *topics: str) -> LinkSettings:
        """Return the settings of a connection that subscribes to topics."""
        return LinkSettings(
            host=self.host,
            port=self.port,
            client_id=client_id,
            subscriptions=tuple((topic, 1) for topic in topics),
            username=self.username,
            password=self.password,
            tls=self.tls,
        )


def parse_broker(
    text: str,
    username: str | None = None,
    password: str | None = None,
    *,
    default_port: int = DEFAULT_PORT,
) -> BrokerAddress:
    """Return the address in `host` or `host:port` ([...] around an IPv6 address)."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(default_port)
    if not (host and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise BrokerError(f"the broker {text!r} is not host:port, for example 192.168.1.10:1883")
    return BrokerAddress(host.strip("[]"), int(port), username, password)
