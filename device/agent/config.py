"""agent.toml: who the board is, which broker it talks to and how it takes updates."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from device.errors import ConfigError, ProfileError
from device.profile import load_profile
from device.protocol.documents import MAX_BEAT_S, CommandName
from device.protocol.tls import TlsFiles
from device.protocol.topics import DeviceId
from device.toml_file import decode_toml, user_path
from device.trust.exchange import MQTT_REPOSITORY
from device.update.sources.reader import is_source
from device.update.update_table import Seconds, Table, UpdateTable

MqttVersion = Literal["auto", "5", "3.1.1"]
Label = Annotated[str, Meta(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f,=]*\Z")]


class TlsTable(Table, frozen=True, kw_only=True):
    """[broker.tls]: PEM files; relative paths are beside agent.toml.

    `ca` vouches for the broker; `certificate` and `key` are this device's.
    """

    ca: Annotated[str, Meta(min_length=1)]
    certificate: Annotated[str, Meta(min_length=1)] | None = None
    key: Annotated[str, Meta(min_length=1)] | None = None


class BrokerTable(Table, frozen=True, kw_only=True):
    """[broker]: where the broker is and how to log in. Without `tls` the connection is plain.

    `beat_s`: the agent says at least so often that it is alive.
    """

    host: Annotated[str, Meta(min_length=1)]
    port: Annotated[int, Meta(ge=1, le=65535)] = 1883
    mqtt_version: MqttVersion = "auto"
    username: str | None = None
    password: str | None = None
    keepalive_s: Annotated[int, Meta(ge=5, le=3600)] = 30
    beat_s: Annotated[float, Meta(ge=5.0, le=MAX_BEAT_S)] = 300.0
    tls: TlsTable | None = None

    def __repr__(self) -> str:  # a config that is logged must not show the password
        return f"BrokerTable({self.host}:{self.port}, mqtt_version={self.mqtt_version})"


class PipelineTable(Table, frozen=True, kw_only=True):
    """[pipeline]: the limits of the pipeline process.

    `stall_s`: without a heartbeat for so long (or three times its first inference, or what its
    frames take) it is killed and started again. `start_s`: so long it may take to load.
    `memory_mb`: MiB that it and what it starts may hold; None: three quarters of what the machine
    or the service has. `data_mb`: MiB that the sinks of a release may write. `services`: releases
    may bring programs of other runtimes, which run as this agent's user.
    """

    stall_s: Annotated[float, Meta(ge=1.0, le=3600.0)] = 2.0
    start_s: Seconds = 120.0
    memory_mb: Annotated[int, Meta(ge=16)] | None = None
    data_mb: Annotated[int, Meta(ge=1)] = 1024
    services: bool = False


class PrepareTable(Table, frozen=True, kw_only=True):
    """[prepare]: the limits of TensorRT while it builds one segment of a release.

    `timeout_s`: so long it may take; `total_timeout_s`: all segments of the release together.
    `memory_mb`: MiB that it may hold; None: three quarters of what the machine or the service has.
    """

    timeout_s: Seconds = 1800.0
    total_timeout_s: Seconds = 7200.0
    memory_mb: Annotated[int, Meta(ge=16)] | None = None


class SmpTable(Table, frozen=True, kw_only=True):
    """[smp]: take releases over a serial line or UDP, by SMP (mcumgr).

    `device`: the tty; `framing` of it: "console" or "raw"; `baud`: of a UART. `buffer_bytes`: the
    largest request; None: by the tty. `udp`: "address:port" of this board to listen on; who reaches
    it may upload, erase uploads and start the agent again.
    """

    device: Annotated[str, Meta(min_length=1)] | None = None
    framing: Literal["console", "raw"] = "console"
    baud: Annotated[int, Meta(ge=1200)] = 115200
    buffer_bytes: Annotated[int, Meta(ge=256, le=65_000)] | None = None
    udp: Annotated[str, Meta(pattern=r"^[0-9a-fA-F.:\[\]]+:[0-9]{1,5}\Z")] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a table without a line."""
        if self.device is None and self.udp is None:
            raise ValueError("[smp] names no line: set device or udp")
        if self.udp is not None and not 0 <= split_udp(self.udp)[1] <= 65535:
            raise ValueError(f"[smp] udp = {self.udp!r}: the port is not from 0 to 65535")


class SourceTable(Table, frozen=True, kw_only=True):
    """[source]: the camera of this board, in place of the one that pipeline.toml names; where that
    has several, [sources.ID] for each."""

    uri: Annotated[str, Meta(min_length=1)]


class TrustTable(Table, frozen=True, kw_only=True):
    """[trust]: what a signed release is checked by.

    `dir`: the folder with the fleet's root.json and director.json. `repository`: where signed
    metadata come from: "mqtt:" (the server behind the broker), a URL or a folder. `timeout_s`: so
    long one check may take.
    """

    dir: Annotated[str, Meta(min_length=1)] = "trust"
    repository: Annotated[str, Meta(min_length=1)] = "mqtt:"
    timeout_s: Annotated[float, Meta(ge=1.0, le=3600.0)] = 60.0


class CommandsTable(Table, frozen=True, kw_only=True):
    """[commands]: what an operator may have this device do, over MQTT.

    `allow`: the operations; rebooting has to be named. `reboot_command`: what reboots.
    """

    allow: tuple[CommandName, ...] = (
        "restart", "pipeline", "snapshot", "log", "logs", "report", "job",
    )  # fmt: skip
    reboot_command: Annotated[tuple[str, ...], Meta(min_length=1)] = ("systemctl", "reboot")


class LogTable(Table, frozen=True, kw_only=True):
    """[log]: lines of the agent and its pipeline over MQTT.

    `publish`: always; otherwise only while a command asks for them. `max_per_s`: more lines a
    second are left out, and counted.
    """

    publish: bool = False
    max_per_s: Annotated[float, Meta(gt=0.0, le=1000.0)] = 20.0


class AgentConfig(Table, frozen=True, kw_only=True):
    """agent.toml, checked. `labels`: what operators call this device, for rollouts that choose."""

    device: DeviceId
    profile: Annotated[str, Meta(min_length=1, max_length=200)]
    state_dir: Annotated[str, Meta(min_length=1)]
    dev: bool = False
    broker: BrokerTable
    update: UpdateTable = UpdateTable()
    pipeline: PipelineTable = PipelineTable()
    prepare: PrepareTable = PrepareTable()
    trust: TrustTable = TrustTable()
    commands: CommandsTable = CommandsTable()
    log: LogTable = LogTable()
    labels: dict[Label, Label] = msgspec.field(default_factory=dict)
    smp: SmpTable | None = None
    source: SourceTable | None = None
    sources: dict[str, SourceTable] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError for two ways to name the cameras."""
        if self.source is not None and self.sources:
            raise ValueError("write [source] for one camera, or [sources.ID] for several, not both")


def load_agent_config(path: Path) -> AgentConfig:
    """Read agent.toml; ConfigError names the key.

    `profile` is the name of a shipped profile or the path of a profile's TOML file; the config has
    its name. Relative paths are beside the file.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    try:
        config = decode_toml(text, AgentConfig)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    for place in config.update.sources:
        if not is_source(place):
            raise ConfigError(
                f"{path}: update.sources: {place!r} is no source: write mqtt, an http, https or "
                "file URL, or a path from the root"
            )
    folder = path.resolve().parent
    state_dir = folder / user_path(config.state_dir)
    profile = _profile_name(config.profile, path, folder)
    broker = msgspec.structs.replace(config.broker, tls=_tls(config, path, folder))
    trust = msgspec.structs.replace(
        config.trust,
        dir=str(folder / user_path(config.trust.dir)),
        repository=_repository(config.trust.repository, folder),
    )
    update = config.update
    if update.ca is not None:
        update = msgspec.structs.replace(update, ca=str(folder / user_path(update.ca)))
    return msgspec.structs.replace(
        config,
        state_dir=str(state_dir),
        profile=profile,
        broker=broker,
        trust=trust,
        update=update,
    )


def split_udp(text: str) -> tuple[str, int]:
    """Return address and port of `udp` in [smp]."""
    address, _, port = text.rpartition(":")
    return address.strip("[]"), int(port)


def tls_files(broker: BrokerTable) -> TlsFiles | None:
    """Return the files of [broker.tls] of a config that was loaded; None: a plain connection."""
    tls = broker.tls
    if tls is None:
        return None
    certificate = None if tls.certificate is None else Path(tls.certificate)
    return TlsFiles(Path(tls.ca), certificate, None if tls.key is None else Path(tls.key))


def _tls(config: AgentConfig, path: Path, folder: Path) -> TlsTable | None:
    """Return [broker.tls] with whole paths; refuse a plain connection outside a bench."""
    tls = config.broker.tls
    if tls is None:
        if not config.dev:
            raise ConfigError(
                f"{path}: [broker.tls] is missing: a device takes a plain connection only with "
                "dev = true, on a bench. Set ca, certificate and key of this device"
            )
        return None
    if (tls.certificate is None) != (tls.key is None):
        lone = "key" if tls.certificate is None else "certificate"
        raise ConfigError(f"{path}: [broker.tls] has a {lone} alone: name certificate and key")
    certificate, key = (
        None if name is None else str(folder / user_path(name))
        for name in (tls.certificate, tls.key)
    )
    return TlsTable(ca=str(folder / user_path(tls.ca)), certificate=certificate, key=key)


def _repository(text: str, folder: Path) -> str:
    """Return where signed metadata come from, a folder as its whole path."""
    is_name = text == MQTT_REPOSITORY or text.startswith(("http://", "https://"))
    return text if is_name else str(folder / user_path(text))


def _profile_name(profile: str, path: Path, folder: Path) -> str:
    """Return the name of a profile that exists: no release fits another one."""
    is_file = profile.endswith(".toml")
    try:
        return load_profile(folder / user_path(profile) if is_file else profile).name
    except ProfileError as error:
        raise ConfigError(f"{path}: profile: {error}") from error
