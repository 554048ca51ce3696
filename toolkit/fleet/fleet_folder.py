"""The folder of a fleet: fleet.toml says where its broker and its store are."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from device.protocol.mqtt import LinkSettings
from device.toml_file import decode_toml
from toolkit.errors import RolloutError
from toolkit.fleet.store.database import Database, open_database

FLEET_FILE = "fleet.toml"


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables: frozen, and unknown keys are refused."""


class BrokerTable(_Table, frozen=True, kw_only=True):
    """[broker]: where the broker is and how the server logs in."""

    host: Annotated[str, Meta(min_length=1)]
    port: Annotated[int, Meta(ge=1, le=65535)] = 1883
    mqtt_version: Literal["auto", "5", "3.1.1"] = "auto"
    username: str | None = None
    password: str | None = None

    def __repr__(self) -> str:  # a config that is logged must not show the password
        return f"BrokerTable({self.host}:{self.port}, mqtt_version={self.mqtt_version})"


class FleetFile(_Table, frozen=True, kw_only=True):
    """fleet.toml. `store`: sqlite:///FILE below the folder, or a URL of PostgreSQL."""

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    store: str = "sqlite:///fleet.db"
    broker: BrokerTable


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet's folder and its fleet.toml."""

    folder: Path
    file: FleetFile

    def link_settings(
        self, client_id: str, subscriptions: tuple[tuple[str, int], ...]
    ) -> LinkSettings:
        """Return how a program of the fleet connects to the broker."""
        broker = self.file.broker
        return LinkSettings(
            host=broker.host,
            port=broker.port,
            client_id=client_id,
            subscriptions=subscriptions,
            mqtt_version=broker.mqtt_version,
            username=broker.username,
            password=broker.password,
        )

    def open_store(self) -> Database:
        """Open the fleet's store."""
        return open_database(self.file.store, self.folder)


def load_fleet(folder: Path) -> Fleet:
    """Read the fleet.toml of a folder; RolloutError names what is wrong."""
    path = folder / FLEET_FILE
    try:
        text = path.read_bytes()
    except OSError as error:
        raise RolloutError(
            f"{folder} is no folder of a fleet: cannot read {path}: {error.strerror}"
        ) from error
    try:
        return Fleet(folder.resolve(), decode_toml(text, FleetFile))
    except ValueError as error:
        raise RolloutError(f"{path}: {error}") from error
