"""Options that the commands of fleets, boards and registries share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.cli.command import FILE, FOLDER, option


def fleet_option() -> Any:  # noqa: ANN401
    """Return the field `folder`, that of the fleet."""
    return option(
        "The fleet's folder, with its fleet.toml.",
        "--fleet", type=FOLDER, envvar="TANDEM_FLEET", default=".", show_default="this folder",
        metavar="DIR",
    )  # fmt: skip


def signing_fleet_option() -> Any:  # noqa: ANN401
    """Return the field `fleet`, whose keys sign."""
    return option(
        "Sign with the keys of this fleet's folder; publishes the bundle there.", type=FOLDER
    )


def watch_option() -> Any:  # noqa: ANN401
    """Return the field `watch`."""
    return option("Update the output as it changes.")


@dataclass(frozen=True, slots=True)
class BrokerLogin:
    """The account of an MQTT broker."""

    username: str | None = option("User name for the broker.")
    password: str | None = option(
        "Password for the broker; prefer the environment variable.", envvar="TANDEM_MQTT_PASSWORD"
    )


@dataclass(frozen=True, slots=True)
class RegistryOptions:
    """How a registry is reached."""

    ca: Path | None = option(
        "oci://: certificates to trust.  [default: the system's]",
        type=FILE, envvar="TANDEM_REGISTRY_CA", metavar="FILE",
    )  # fmt: skip
    plain_http: bool = option("oci://: the registry has no TLS.")


@dataclass(frozen=True, slots=True)
class BoardLogin:
    """How boards that are found are logged in to."""

    login: str = option(
        "User to log in to found boards as. [default: that of ssh, or the announced one]",
        default="", metavar="USER",
    )  # fmt: skip
    ssh_config: Path | None = option(
        "Another configuration of ssh for boards that are found.", type=FILE
    )
