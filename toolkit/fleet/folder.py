"""The folder of a fleet: fleet.toml beside keys, repository and what boards get.

fleet.toml    name, broker, where the fleet's state is stored
keys/         private keys
repository/   signed metadata and released bundles
trust/        what every board gets
identity/     the CA, certificates of the broker, of operators and of devices
broker/       the configuration of the MQTT broker
.servers      by what servers that share a store know that they share the folder
"""

import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from device.errors import ConfigError, TrustError
from device.files import make_folder, replace_file, sync_folder
from device.protocol.tls import TlsFiles
from device.toml_file import decode_toml
from toolkit.errors import FleetError
from toolkit.fleet.authority import OPERATOR
from toolkit.fleet.brokers.address import TLS_PORT, BrokerAddress, parse_broker
from toolkit.fleet.brokers.mosquitto import BrokerFiles, Software
from toolkit.fleet.brokers.software import write_broker
from toolkit.fleet.trust.certificates import init_identity
from toolkit.fleet.trust.repository import make_repository

SETTINGS = "fleet.toml"
IDENTITY, BROKER = "identity", "broker"


class BrokerTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[broker]: where it is. `tls`: false only on a bench, whose devices have dev = true."""

    software: Software = "mosquitto"
    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = TLS_PORT
    mqtt_version: Literal["auto", "5", "3.1.1"] = "auto"
    tls: bool = True
    username: str | None = None
    password: str | None = None

    def __repr__(self) -> str:  # settings that are logged must not show the password
        return f"BrokerTable({self.host}:{self.port}, mqtt_version={self.mqtt_version})"


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """fleet.toml, checked. `store`: a URL; a relative SQLite file is in the fleet's folder."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+\Z")]
    store: Annotated[str, Meta(min_length=1)] = "sqlite:///fleet.db"
    broker: BrokerTable = BrokerTable()


def make_fleet(
    folder: Path,
    *,
    name: str,
    broker: str | None,
    hosts: Sequence[str] = (),
    root_keys: int = 1,
    threshold: int = 1,
) -> FleetSettings:
    """Make the folder, whole or not at all.

    `broker`: its software, its address, or both as SOFTWARE@HOST:PORT; `hosts`: more names and
    addresses of it, for its certificate. Raises TrustError: it
    holds a fleet, or the threshold cannot be met; FleetError: it holds other files.
    """
    host, port, software = _parse_init_broker(broker)
    try:
        settings = msgspec.convert(
            {"name": name, "broker": {"software": software, "host": host, "port": port}},
            FleetSettings,
        )
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{name!r} cannot be the name of a fleet: use at most 64 letters, digits and . _ -"
        ) from error
    _check_empty(folder)
    make_folder(folder.resolve().parent)
    temporary = folder.with_name(f".{folder.resolve().name}.{secrets.token_hex(8)}.tmp")
    try:
        make_repository(temporary, root_keys=root_keys, threshold=threshold)
        names = tuple(dict.fromkeys((host, *hosts, "localhost", "127.0.0.1")))
        authority = init_identity(temporary / IDENTITY, fleet=name, hosts=names)
        replace_file(temporary / "trust" / "ca.crt", authority.ca_pem)
        write_broker(_broker_files(folder, settings), into=temporary / BROKER)
        _write_settings(temporary, settings)
        os.rename(temporary, folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise FleetError(f"cannot make the fleet {folder}: {error.strerror}") from error
        raise
    sync_folder(folder.resolve().parent)
    return settings


def _parse_init_broker(text: str | None) -> tuple[str, int, str]:
    """Return host, port and software of a broker that is to be set up."""
    software, at, address = (text or "").partition("@")
    if not at and software not in get_args(Software):
        software, address = "mosquitto", software
    if software not in get_args(Software):
        known = " or ".join(get_args(Software))
        raise FleetError(f"{software!r} is no broker that a fleet can have: use {known}")
    if not address:
        return "127.0.0.1", TLS_PORT, software
    parsed = parse_broker(address, default_port=TLS_PORT)
    return parsed.host, parsed.port, software


def _check_empty(folder: Path) -> None:
    """Refuse a folder that holds a fleet, or anything else."""
    if (folder / SETTINGS).exists() or (folder / "keys").exists():
        raise TrustError(f"{folder} holds a fleet already: choose another folder")
    if folder.exists() and folder.samefile(Path.cwd()):
        raise FleetError(f"{folder} is the folder that you are in: name a new one for the fleet")
    if folder.exists() and any(folder.iterdir()):
        raise FleetError(f"{folder} is not empty: choose a new folder for the fleet")


def broker_files(folder: Path) -> BrokerFiles:
    """Return where the files of the fleet's broker are."""
    return _broker_files(folder, load_settings(folder))


def _broker_files(folder: Path, settings: FleetSettings) -> BrokerFiles:
    broker = settings.broker
    return BrokerFiles(folder / BROKER, folder / IDENTITY, broker.port, broker.software)


def broker_address(folder: Path, name: str = OPERATOR) -> BrokerAddress:
    """Return the fleet's broker with the certificate of an operator or of the server."""
    broker, identity = load_settings(folder).broker, folder / IDENTITY
    tls = TlsFiles(identity / "ca.crt", identity / f"{name}.crt", identity / f"{name}.key")
    login = broker.username, broker.password
    return BrokerAddress(broker.host, broker.port, *login, tls if broker.tls else None)


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
        f'[broker]\nsoftware = "{broker.software}"\nhost = "{broker.host}"\nport = {broker.port}\n'
        f'mqtt_version = "{broker.mqtt_version}"\ntls = {str(broker.tls).lower()}\n'
    )
    decode_toml(text.encode(), FleetSettings)
    make_folder(folder)
    replace_file(folder / SETTINGS, text.encode())
