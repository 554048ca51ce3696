"""Build a Debian package of the agent: `python -m scripts.make_deb WHEEL --jetpack 6 --out dist`.

The package carries Tandem's wheel and those of its dependencies, so a board needs no network. They
come from the index, in the tested versions of a JetPack (`--jetpack`), or from a folder
(`--wheels`).
The same wheels and the same SOURCE_DATE_EPOCH give the same bytes; without it the newest time in
Tandem's wheel counts. What the package does on a board is in scripts/debian.
"""

import argparse
import calendar
import gzip
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.parser import Parser
from email.utils import formatdate
from pathlib import Path

from packaging.version import InvalidVersion, Version

from device.errors import BundleError, TandemError
from device.numpy_bound import NUMPY_1
from device.update.agent_payload import OWN_WHEEL, AgentPayload
from toolkit.errors import BoardError
from toolkit.fleet.boards.probe import Probe
from toolkit.fleet.boards.texts import command_text
from toolkit.fleet.boards.wheels import gather
from toolkit.fleet.bundles.agent import payload_of

NAME = "tandem-agent"
USER = "tandem"
TEMPLATES = Path(__file__).parent / "debian"
SCRIPTS = ("postinst", "prerm", "postrm")
WHEELS = f"usr/lib/{NAME}/wheels"
EXTRAS = ("fleet", "serial")  # as `tandem board init` has them
ARCHITECTURES = {"aarch64": "arm64", "x86_64": "amd64", "": "all"}
# Python, glibc and JetPack's NumPy, by the JetPack.
JETPACKS = {"6": ((3, 10, 0), "2.35"), "7": ((3, 12, 0), "2.39")}
MAINTAINER = "The Tandem authors <tandem@example.org>"
DESCRIPTION = """\
agent that runs camera pipelines on Jetson boards
 It runs a pipeline on an engine of Tandem, publishes detections over MQTT and
 takes signed releases into the idle one of two slots. A release that does not
 work is rolled back.
 .
 The package makes the environment /opt/tandem, which sees the packages of the
 system. A fleet may install further versions of the agent beside it.
"""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a package is made of. `wheel` is Tandem's, `wheels` are all; `epoch_s`: Unix time."""

    wheel: Path
    wheels: tuple[Path, ...]
    extras: tuple[str, ...]
    maintainer: str
    epoch_s: int

    @property
    def version(self) -> str:
        """The version of Tandem's wheel."""
        return self.wheel.name.split("-")[1]

    @property
    def payload(self) -> AgentPayload:
        """Which boards take all wheels."""
        return payload_of([path.name for path in self.wheels])


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the package that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path, metavar="WHEEL", help="Tandem's wheel")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--jetpack", choices=tuple(JETPACKS), help="download what this JetPack needs"
    )
    source.add_argument("--wheels", type=Path, metavar="DIR", help="wheels of the dependencies")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--extra", action="append", default=[], metavar="NAME",
        help=f"extras of tandem-edge; repeatable [default: {', '.join(EXTRAS)}]",
    )  # fmt: skip
    parser.add_argument("--maintainer", default=MAINTAINER, metavar="'NAME <ADDRESS>'")
    options = parser.parse_args(arguments)
    extras = tuple(options.extra) or EXTRAS
    try:
        with tempfile.TemporaryDirectory(prefix="tandem-deb-") as folder:
            wheels = gather_wheels(
                options.wheel, extras, Path(folder), jetpack=options.jetpack, source=options.wheels
            )
            epoch_s = source_date(options.wheel, os.environ)
            contents = Contents(options.wheel, wheels, extras, options.maintainer, epoch_s)
            sys.stdout.write(f"{build(contents, options.out)}\n")
    except TandemError as error:
        sys.exit(f"make_deb: {error}")
    return 0


def gather_wheels(
    wheel: Path, extras: Sequence[str], folder: Path, *, jetpack: str | None, source: Path | None
) -> tuple[Path, ...]:
    """Return Tandem's wheel and those that it needs, from the index or the folder `source`.

    Raises TandemError: one is missing, or no board can take all of them.
    """
    if not wheel.name.startswith(OWN_WHEEL) or not zipfile.is_zipfile(wheel):
        raise BundleError(f"{wheel} is no wheel of tandem-edge")
    if source is None:
        python, glibc = JETPACKS[jetpack or ""]
        return gather(wheel, extras, _bare_board(python, "aarch64", glibc, NUMPY_1), folder, None)
    payload = payload_of([path.name for path in (wheel, *source.glob("*.whl"))])
    major, minor = map(int, payload.min_python.split("."))
    machine, glibc = payload.machine or os.uname().machine, payload.min_glibc or "2.17"
    board = _bare_board((major, minor, 0), machine, glibc, "numpy")
    return gather(wheel, extras, board, folder, source)


def _bare_board(python: tuple[int, int, int], machine: str, glibc: str, numpy: str) -> Probe:
    """Return a board whose Python has no packages: the package must bring all of them."""
    return Probe(
        python=python, abi=f"cp{python[0]}{python[1]}", machine=machine, glibc=glibc, numpy=numpy,
        free_mb=0, model="", compatible="", serial="", nv_release="", host="", systemd=True,
        packages={}, distributions={},
    )  # fmt: skip


def source_date(wheel: Path, environment: Mapping[str, str]) -> int:
    """Return the time of all files, in s since 1970: SOURCE_DATE_EPOCH, or the wheel's newest."""
    if text := environment.get("SOURCE_DATE_EPOCH"):
        return int(text)
    with zipfile.ZipFile(wheel) as archive:
        return max(calendar.timegm((*entry.date_time, 0, 0, 0)) for entry in archive.infolist())


def build(contents: Contents, out: Path) -> Path:
    """Write the package into the folder `out` and return its path. Raises TandemError."""
    version = debian_version(contents.version)
    architecture = ARCHITECTURES.get(contents.payload.machine)
    if architecture is None:
        raise BundleError(
            f"the wheels are for {contents.payload.machine}: Debian's name of it is not known"
        )
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{NAME}_{version}_{architecture}.deb"
    with tempfile.TemporaryDirectory(prefix="tandem-deb-") as name:
        tree = Path(name) / "tree"
        for path, (data, mode) in files_of(contents).items():
            _write(tree / path, data, mode)
        for wheel in contents.wheels:
            _write(tree / WHEELS / wheel.name, wheel.read_bytes(), 0o644)
        for path, (data, mode) in control_files(contents, tree, architecture).items():
            _write(tree / "DEBIAN" / path, data, mode)
        _set_times(tree, contents.epoch_s)
        # Wheels are packed already: more effort makes the package no smaller.
        command = (
            "dpkg-deb",
            "--build",
            "--root-owner-group",
            "-Zxz",
            "-z1",
            str(tree),
            str(target),
        )
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(contents.epoch_s)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise BoardError(f"dpkg-deb builds no package: {done.stderr.strip()}")
    return target


def debian_version(version: str) -> str:
    """Return a version of Python as one of Debian: 1.0.dev1 < 1.0rc1 < 1.0 < 1.0.post1 stay so."""
    try:
        parsed = Version(version)
    except InvalidVersion as error:
        raise BundleError(f"{version} is no version: {error}") from error
    text = parsed.base_version.replace("!", ":")
    if parsed.pre:
        text += f"~{parsed.pre[0]}{parsed.pre[1]}"
    if parsed.post is not None:
        text += f"+post{parsed.post}"
    if parsed.dev is not None:
        text += (
            f"~dev{parsed.dev}" if parsed.pre or parsed.post is not None else f"~~dev{parsed.dev}"
        )
    return text + (f"+{parsed.local}" if parsed.local else "")


def files_of(contents: Contents) -> dict[str, tuple[bytes, int]]:
    """Return bytes and mode of all files but wheels; unit and agent.toml are Tandem's own."""
    with zipfile.ZipFile(contents.wheel) as archive:
        try:
            unit = archive.read("tandem/configs/tandem-agent.service")
            settings = archive.read("tandem/configs/agent.toml")
        except KeyError as error:
            raise BundleError(f"{contents.wheel.name}: {error.args[0]}") from error
    manual = (TEMPLATES / f"{NAME}.1").read_text().replace("@VERSION@", contents.version)
    documents = f"usr/share/doc/{NAME}"
    return {
        "etc/tandem/agent.toml": (settings, 0o644),
        f"lib/systemd/system/{NAME}.service": (unit, 0o644),
        f"usr/bin/{NAME}": (command_text(USER).encode(), 0o755),
        f"usr/share/man/man1/{NAME}.1.gz": (_packed(manual), 0o644),
        f"{documents}/changelog.gz": (_packed(changelog_text(contents)), 0o644),
        f"{documents}/copyright": (copyright_text(contents).encode(), 0o644),
    }


def control_files(
    contents: Contents, tree: Path, architecture: str
) -> dict[str, tuple[bytes, int]]:
    """Return bytes and mode of each file of DEBIAN, of the tree as it will be installed."""
    paths = sorted(path for path in tree.rglob("*") if path.is_file())
    size_kib = sum(-(-path.stat().st_size // 1024) for path in paths)
    sums = "".join(
        f"{hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()}  "
        f"{path.relative_to(tree).as_posix()}\n"
        for path in paths
    )
    settings = {
        "@WHEEL@": contents.wheel.name,
        "@EXTRAS@": ",".join(contents.extras),
        "@VERSION@": contents.version,
    }
    files = {
        "control": (control_text(contents, architecture, size_kib).encode(), 0o644),
        "conffiles": (b"/etc/tandem/agent.toml\n", 0o644),
        "md5sums": (sums.encode(), 0o644),
    }
    for name in SCRIPTS:
        text = (TEMPLATES / name).read_text()
        for key, value in settings.items():
            text = text.replace(key, value)
        files[name] = (text.encode(), 0o755)
    return files


def control_text(contents: Contents, architecture: str, size_kib: int) -> str:
    """Return the file `control`; what the wheels need of Python and glibc are dependencies."""
    payload = contents.payload
    depends = ["adduser", "python3-venv", f"python3 (>= {payload.min_python}~)"]
    if payload.below_python:
        depends.append(f"python3 (<< {payload.below_python})")
    if payload.min_glibc:
        depends.append(f"libc6 (>= {payload.min_glibc})")
    return (
        f"Package: {NAME}\nVersion: {debian_version(contents.version)}\n"
        f"Architecture: {architecture}\nMaintainer: {contents.maintainer}\n"
        f"Installed-Size: {size_kib}\nDepends: {', '.join(sorted(depends))}\n"
        f"Section: utils\nPriority: optional\nDescription: {DESCRIPTION}"
    )


def changelog_text(contents: Contents) -> str:
    """Return Debian's changelog: this version."""
    return (
        f"{NAME} ({debian_version(contents.version)}) unstable; urgency=medium\n\n"
        f"  * Tandem {contents.version}.\n\n"
        f" -- {contents.maintainer}  {formatdate(contents.epoch_s)}\n"
    )


def copyright_text(contents: Contents) -> str:
    """Return the licences of all wheels, as each declares its own."""
    rows = "".join(f"  {path.name}\n    {_licence(path)}\n" for path in contents.wheels)
    return (
        f"Copyright (C) {time.gmtime(contents.epoch_s).tm_year} the Tandem authors\n"
        "License: Apache-2.0, see /usr/share/common-licenses/Apache-2.0\n\n"
        f"The wheels in /{WHEELS} are archives of their projects as\n"
        "published; each has its copyright notices and licence texts in its .dist-info:\n\n"
        f"{rows}"
    )


def _licence(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(name).decode())
    plain = str(fields.get("License-Expression") or fields.get("License") or "").strip()
    if plain and "\n" not in plain:
        return plain
    classes = [row for row in fields.get_all("Classifier") or () if row.startswith("License ::")]
    return "; ".join(row.rpartition(" :: ")[2] for row in classes) or "see its .dist-info"


def _packed(text: str) -> bytes:
    return gzip.compress(text.encode(), 9, mtime=0)


def _write(path: Path, data: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)


def _set_times(tree: Path, epoch_s: int) -> None:
    """Give every file one time, and every folder the mode 755, whatever the umask is."""
    for path in (tree, *tree.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
        os.utime(path, (epoch_s, epoch_s))


if __name__ == "__main__":
    sys.exit(main())
