"""What the steps of `tandem board init` work on: the board, what was asked, and its files."""

import hashlib
import io
import shlex
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from toolkit.fleet.boards.probe import Probe
from toolkit.fleet.boards.shell import Shell
from toolkit.fleet.boards.texts import AgentSettings

PackagesFrom = Literal["host", "board"] | Path
StepState = Literal["already", "skipped", "todo"]


@dataclass(frozen=True, slots=True)
class InitOptions:
    """What was asked. `packages`: who downloads what the board lacks, or a folder of wheels.

    `user`: as whom the agent runs. `overwrite`: agent.toml, though it was changed on the board.
    """

    settings: AgentSettings
    wheel: Path
    work: Path
    fleet: Path | None = None
    packages: PackagesFrom = "host"
    extras: tuple[str, ...] = ("fleet", "serial")
    user: str = "tandem"
    power_mode: str = ""
    overwrite: bool = False
    start_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class State:
    """Whether a step has to be done, and why not; or what it will do."""

    kind: StepState
    detail: str = ""


@dataclass(slots=True)
class Setup:
    """A board that is being set up. `cache`: files of the board that were read."""

    shell: Shell
    probe: Probe
    options: InitOptions
    login: str
    groups: tuple[str, ...]
    cache: dict[str, bytes | None] = field(default_factory=dict)

    def read(self, path: str) -> bytes | None:
        """Return a file of the board, None if there is none; as root."""
        if path not in self.cache:
            done = self.shell.as_root(f"test -e {shlex.quote(path)} && cat {shlex.quote(path)}")
            self.cache[path] = done.stdout if done.status == 0 else None
        return self.cache[path]

    def write(self, path: str, content: bytes, *, mode: str, owner: str = "root:root") -> None:
        """Write a file of the board, whole or not at all; as root."""
        name = shlex.quote(path)
        script = (
            f"set -e; umask 077; mkdir -p -m 755 {shlex.quote(str(Path(path).parent))}\n"
            f"cat > {name}.new; chown {owner} {name}.new; chmod {mode} {name}.new\n"
            f"sync {name}.new; mv -f {name}.new {name}"
        )
        self.shell.must(script, content, root=True, what=f"write {path}")
        self.cache[path] = content


def packed(files: Iterable[Path]) -> bytes:
    """Return files, by their names alone, as a tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in files:
            archive.add(path, arcname=path.name)
    return buffer.getvalue()


def stamp_of(parts: Mapping[str, str]) -> bytes:
    """Return a line that is the same for the same parts."""
    text = "\n".join(f"{key}={value}" for key, value in sorted(parts.items()))
    return hashlib.sha256(text.encode()).hexdigest().encode() + b"\n"
