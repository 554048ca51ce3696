"""User and password for a registry: from the environment, or what `docker login` has stored."""

import base64
import binascii
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from toolkit.errors import RegistryError

USER, PASSWORD = "TANDEM_REGISTRY_USER", "TANDEM_REGISTRY_PASSWORD"


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user; the password is not shown."""

    user: str
    password: str = field(repr=False)

    @property
    def basic(self) -> str:
        """The header of HTTP's basic authentication."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


class _Login(msgspec.Struct):
    auth: str = ""


class _DockerConfig(msgspec.Struct):
    auths: dict[str, _Login] = {}


def find_credentials(
    host: str, environment: Mapping[str, str] = os.environ, config: Path | None = None
) -> Credentials | None:
    """Return the credentials for a registry, None to ask as nobody.

    `config`: the file that `docker login` writes; logins in a helper program are not read. Raises
    RegistryError: half of them are set, or the file cannot be read.
    """
    user, password = environment.get(USER), environment.get(PASSWORD)
    if user and password:
        return Credentials(user, password)
    if user or password:
        raise RegistryError(f"{PASSWORD if user else USER} is not set: set both, or none")
    folder = environment.get("DOCKER_CONFIG") or str(Path.home() / ".docker")
    path = config or Path(folder) / "config.json"
    try:
        logins = msgspec.json.decode(path.read_bytes(), type=_DockerConfig).auths
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RegistryError(f"the logins in {path} cannot be read: {error}") from error
    login = logins.get(host) or logins.get(f"https://{host}")
    if login is None or not login.auth:
        return None
    try:
        user, colon, password = base64.b64decode(login.auth, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise RegistryError(
            f"the login for {host} in {path} is damaged: log in again with `docker login {host}`"
        ) from error
    return Credentials(user, password) if colon else None
