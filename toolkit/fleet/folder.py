"""The folder of a fleet: fleet.toml beside keys, repository and what boards get.

fleet.toml    name, broker, where the fleet's state is stored
keys/         private keys
repository/   signed metadata and released bundles
trust/        what every board gets
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from device.errors import ConfigError
from device.files import make_folder, replacing
from device.toml_file import decode_toml
from toolkit.fleet.deploy import DEFAULT_PORT, BrokerAddress, parse_broker
from toolkit.fleet.repository import make_repository

SETTINGS = "fleet.toml"


class BrokerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[broker]: where it is."""

    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = DEFAULT_PORT
    mqtt_version: Literal["auto", "5", "3.1.1"] = "auto"


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """fleet.toml, checked. `store`: a URL; a relative SQLite file is in the fleet's folder."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+\Z")]
    store: Annotated[str, Meta(min_length=1)] = "sqlite:///fleet.db"
    broker: BrokerTable = BrokerTable()


def make_fleet(
    folder: Path, *, name: str, broker: str | None, root_keys: int, threshold: int
) -> FleetSettings:
    """Make the folder. Raises TrustError: it holds a fleet, or the threshold cannot be met."""
    address = BrokerAddress("127.0.0.1") if broker is None else parse_broker(broker)
    try:
        settings = msgspec.convert(
            {"name": name, "broker": {"host": address.host, "port": address.port}}, FleetSettings
        )
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{name!r} cannot be the name of a fleet: use at most 64 letters, digits and . _ -"
        ) from error
    make_repository(folder, root_keys=root_keys, threshold=threshold)
    _write_settings(folder, settings)
    return settings


def load_settings(folder: Path) -> FleetSettings:
    """Read fleet.toml; ConfigError names the key."""
    path = folder / SETTINGS
    try:
        return decode_toml(path.read_bytes(), FleetSettings)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path} ({error.strerror}): `tandem fleet init` makes a fleet's folder"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _write_settings(folder: Path, settings: FleetSettings) -> None:
    broker = settings.broker
    text = (
        f'name = "{settings.name}"\n'
        f'store = "{settings.store}"  # or postgresql://...\n\n'
        f'[broker]\nhost = "{broker.host}"\nport = {broker.port}\n'
        f'mqtt_version = "{broker.mqtt_version}"\n'
    )
    decode_toml(text.encode(), FleetSettings)
    make_folder(folder)
    with replacing(folder / SETTINGS) as file:
        file.write(text.encode())
