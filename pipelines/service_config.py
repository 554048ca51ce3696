"""The table [service] of pipeline.toml: a program of another runtime, its limits and health."""

from pathlib import PurePosixPath
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Meta, UnsetType

from device.errors import ConfigError
from pipelines.value import Positive, Value

LOOPBACK = ("127.0.0.1", "localhost", "::1")
Period = Annotated[float, Meta(gt=0.0, le=3600.0)]


class ServiceConfig(Value, frozen=True, kw_only=True):
    """[service]: the program that a release of kind "service" runs.

    `command`: a file of the payload, or an absolute path of the board, with its arguments; it
    starts in the payload's folder. `env` is added to its environment. It is healthy while
    `health_url` answers 200 or `health_command` ends with 0, asked every `interval_s`, each time
    for `timeout_s` at most; it is ended after so many `failures` in a row, or without a first
    success within `start_s`. `memory_mb`: MiB that it and what it starts may hold. `cpus`: cores
    that it may use.
    """

    command: Annotated[tuple[str, ...], Meta(min_length=1)]
    env: dict[str, str] = msgspec.field(default_factory=dict)
    health_url: str = ""
    health_command: tuple[str, ...] = ()
    interval_s: Period = 1.0
    timeout_s: Period = 5.0
    failures: Positive = 3
    start_s: Period = 60.0
    memory_mb: Positive | UnsetType = UNSET
    cpus: Positive | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Raise ValueError unless there is one health check, of this machine, and the programs are
        of the payload or named by an absolute path."""
        if bool(self.health_url) == bool(self.health_command):
            raise ValueError("write one of `health_url` and `health_command` in [service]")
        if self.health_url:
            check_health_url(self.health_url)
        for key, words in (("command", self.command), ("health_command", self.health_command)):
            if words and (not words[0] or ".." in PurePosixPath(words[0]).parts):
                raise ValueError(
                    f"`{key}` of [service] begins with {words[0]!r}: name a file of the payload, or"
                    " an absolute path of the board"
                )

    @property
    def programs(self) -> tuple[str, ...]:
        """The files of the payload that are run."""
        firsts = (words[0] for words in (self.command, self.health_command) if words)
        return tuple(dict.fromkeys(name for name in firsts if not name.startswith("/")))


def check_health_url(url: str) -> None:
    """Raise ValueError unless a URL is one of plain HTTP on this machine, with its port."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme == "http" and parts.hostname in LOOPBACK and bool(parts.port)
    except ValueError:
        fits = False
    if not fits or not url.isascii() or any(mark <= " " for mark in url):
        raise ValueError(
            f"`health_url` of [service] is {url!r}: write http://127.0.0.1:PORT/PATH, as the health"
            " of a service is asked on its own board"
        )


def no_service(kind: str, name: str) -> None:
    """Raise ConfigError if a pipeline is a service, which has neither engines nor frames."""
    if kind == "service":
        raise ConfigError(
            f"pipeline {name!r} is of kind 'service', which has no engines and no frames: deploy"
            " its bundle to a board that runs services ([pipeline] services = true in agent.toml)."
        )
