"""A fleet as its programs use it: its folder, how they connect, where its state is stored."""

from dataclasses import dataclass
from pathlib import Path

from device.protocol.mqtt import LinkSettings
from toolkit.fleet.authority import OPERATOR
from toolkit.fleet.folder import FleetSettings, broker_address, load_settings
from toolkit.fleet.store.database import Database, open_database


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet's folder and its fleet.toml."""

    folder: Path
    file: FleetSettings

    def link_settings(
        self,
        client_id: str,
        subscriptions: tuple[tuple[str, int], ...],
        identity: str = OPERATOR,
    ) -> LinkSettings:
        """Return how a program of the fleet connects to the broker; `identity`: its certificate."""
        broker = broker_address(self.folder, identity)
        return LinkSettings(
            host=broker.host,
            port=broker.port,
            client_id=client_id,
            subscriptions=subscriptions,
            mqtt_version=self.file.broker.mqtt_version,
            username=broker.username,
            password=broker.password,
            tls=broker.tls,
        )

    def open_store(self) -> Database:
        """Open the fleet's store."""
        return open_database(self.file.store, self.folder)


def load_fleet(folder: Path) -> Fleet:
    """Read the fleet.toml of a folder; ConfigError names what is wrong."""
    return Fleet(folder.resolve(), load_settings(folder))
