"""agent.toml: who the board is, which broker it talks to and how it takes updates."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from device.errors import ConfigError
from device.protocol.topics import DeviceId

MqttVersion = Literal["auto", "5", "3.1.1"]
Seconds = Annotated[float, Meta(gt=0.0, le=86400.0)]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every table: frozen, and unknown keys are refused."""


class BrokerTable(_Table, frozen=True, kw_only=True):
    """[broker]: where the broker is and how to log in."""

    host: Annotated[str, Meta(min_length=1)]
    port: Annotated[int, Meta(ge=1, le=65535)] = 1883
    mqtt_version: MqttVersion = "auto"
    username: str | None = None
    password: str | None = None
    keepalive_s: Annotated[int, Meta(ge=5, le=3600)] = 30

    def __repr__(self) -> str:  # a config that is logged must not show the password
        return f"BrokerTable({self.host}:{self.port}, mqtt_version={self.mqtt_version})"


class UpdateTable(_Table, frozen=True, kw_only=True):
    """[update]: how a release is fetched and tried.

    `trial_timeout_s`: a new release must give its first result in this time. `window_chunks`: the
    most chunks asked for at once. `stop_grace_s`: a pipeline that is stopped has so long to end.
    """

    trial_timeout_s: Seconds = 30.0
    window_chunks: Annotated[int, Meta(ge=1, le=64)] = 64
    stop_grace_s: Seconds = 5.0


class SourceTable(_Table, frozen=True, kw_only=True):
    """[source]: the camera of this board, in place of the one that pipeline.toml names."""

    uri: Annotated[str, Meta(min_length=1)]


class AgentConfig(_Table, frozen=True, kw_only=True):
    """agent.toml, checked."""

    device: DeviceId
    profile: Annotated[str, Meta(min_length=1, max_length=200)]
    state_dir: Annotated[str, Meta(min_length=1)]
    dev: bool = False
    broker: BrokerTable
    update: UpdateTable = UpdateTable()
    source: SourceTable | None = None


def load_agent_config(path: Path) -> AgentConfig:
    """Read agent.toml; ConfigError names the key. A relative state_dir is beside the file."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    try:
        config = msgspec.toml.decode(text, type=AgentConfig)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    state_dir = path.resolve().parent / Path(config.state_dir).expanduser()
    return msgspec.structs.replace(config, state_dir=str(state_dir))
