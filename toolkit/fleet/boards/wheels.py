"""Which packages a board lacks, and their wheels for its Python: from an index, or from a folder.

What the board's system has in a version that fits is never sent. pip judges conditions such as
`python_version < "3.11"` by the Python that it runs on, the host's; so the closure is made here,
by the board's.
"""

import base64
import ensurepip
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from email.parser import Parser
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

import configs
from device.start.packages import ROOT
from toolkit.errors import BoardError
from toolkit.fleet.boards.probe import Probe

# What the wheel is built of.
SOURCES = (
    *("calibration", "configs", "device", "pipelines", "tandem-stubs", "toolkit"),
    *("pyproject.toml", "setup.py", "tandem.py"),
    *("MANIFEST.in", "README.md", "LICENSE", "THIRD_PARTY.md"),
)
_LEFTOVERS = shutil.ignore_patterns("__pycache__", "*.py[co]", "build", "*.egg-info")
MAX_ROUNDS = 12  # of packages that ask for packages
OLDEST_GLIBC = {"aarch64": 17, "x86_64": 5}  # the minor of 2.x that the first wheels were for
BOARD_LOCKS = {(3, 10): "jetpack6", (3, 12): "jetpack7"}  # by the Python that JetPack brings
BUILD_REQUIRES = ("setuptools>=77",)  # as pyproject.toml says
# Constraints that hold for what builds packages, too: pip has two names for that.
PIP_CONSTRAINTS = ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")
_OF_PIP = ("INSTALLER", "REQUESTED", "direct_url.json")  # what it notes of an installation
REINSTALL = "install tandem-edge again, or name a wheel with --wheel"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")


def environment_of(probe: Probe) -> dict[str, str]:
    """Return the values by which conditions of requirements are judged on a board."""
    return {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": probe.machine,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": ".".join(map(str, probe.python)),
        "python_version": ".".join(map(str, probe.python[:2])),
        "sys_platform": "linux",
    }


def platform_tags(machine: str, glibc: str) -> tuple[str, ...]:
    """Return the platforms whose wheels run on a machine, newest first."""
    parts = glibc.split(".")
    newest = int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else OLDEST_GLIBC["aarch64"]
    oldest = OLDEST_GLIBC.get(machine, 17)
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(newest, oldest - 1, -1)]
    return (*tags, f"manylinux2014_{machine}", f"linux_{machine}")


def requirements_of(wheel: Path, extras: Iterable[str]) -> tuple[tuple[Requirement, str], ...]:
    """Return what a wheel requires, each with the extra for which it is asked, "" for none."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    try:
        rows = [Requirement(line) for line in lines]
    except InvalidRequirement as error:
        raise BoardError(f"{wheel.name}: {error}") from error
    return tuple((row, extra) for row in rows for extra in ("", *extras))


def missing(
    requirements: Iterable[tuple[Requirement, str]],
    present: Mapping[str, str],
    environment: Mapping[str, str],
) -> dict[str, Requirement]:
    """Return by name what is required on a board and not present in a version that fits."""
    lacking: dict[str, Requirement] = {}
    for row, extra in requirements:
        marker = row.marker
        if marker is not None and not marker.evaluate({**environment, "extra": extra}):
            continue
        name = canonicalize_name(row.name)
        if _fits(row, present.get(name)):
            continue
        text = str(row).partition(";")[0].strip()
        if name not in lacking:
            lacking[name] = Requirement(text)
            continue
        lacking[name].specifier &= row.specifier
        lacking[name].extras |= row.extras
    return lacking


def _fits(requirement: Requirement, version: str | None) -> bool:
    if version is None:
        return False
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:  # a system's own package: what is not known is not replaced by a guess
        return False


def gather(
    wheel: Path, extras: Sequence[str], probe: Probe, folder: Path, source: Path | None
) -> tuple[Path, ...]:
    """Download into `folder` what a board lacks for a wheel; return all wheels to send.

    `source`: a folder of wheels in place of the index. Raises BoardError.
    """
    environment, present = environment_of(probe), dict(probe.distributions)
    tested = locked_versions(probe)
    requirements = [*requirements_of(wheel, extras), (Requirement(probe.numpy), "")]
    wheels: dict[str, Path] = {}
    for _ in range(MAX_ROUNDS):
        lacking = missing(requirements, present, environment)
        if not lacking:
            return (wheel, *wheels.values())
        if source is None:
            lacking = {name: _as_tested(row, tested.get(name)) for name, row in lacking.items()}
        for path in _download(lacking.values(), probe, folder, source):
            name, version, *_ = parse_wheel_filename(path.name)
            row = lacking.get(name)
            if row is None:
                continue
            wheels[name], present[name] = path, str(version)
            requirements += requirements_of(path, row.extras)
    raise BoardError(
        f"the packages for {probe.machine} contradict each other: {', '.join(sorted(lacking))}; "
        "give a folder of wheels that fit with --packages"
    )


def lock_file(name: str) -> Path | None:
    """Return a file of tested versions in configs/locks, None if there is none of this name."""
    path = Path(configs.__file__).parent / "locks" / f"{name}.txt"
    return path if path.exists() else None


def locked_versions(probe: Probe) -> dict[str, str]:
    """Return the tested version of each package for the Python of a board; empty for others."""
    path = lock_file(BOARD_LOCKS.get(probe.python[:2], ""))
    lines = [] if path is None else path.read_text().splitlines()
    rows = [line.partition("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in rows}


def _as_tested(row: Requirement, version: str | None) -> Requirement:
    """Return a requirement that takes the tested version alone, where that fits it."""
    if version is None or not _fits(row, version):
        return row
    tested = Requirement(str(row))
    tested.specifier = SpecifierSet(f"=={version}")
    return tested


def _download(
    requirements: Iterable[Requirement], probe: Probe, folder: Path, source: Path | None
) -> list[Path]:
    """Let pip download wheels for the board, without what they require; return all in `folder`."""
    texts = [str(row) for row in requirements]
    tags = platform_tags(probe.machine, probe.glibc)
    python = ".".join(map(str, probe.python[:2]))
    words = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for abi in (probe.abi, "abi3", "none"):
        words += ["--abi", abi]
    for tag in (*tags, "any"):
        words += ["--platform", tag]
    where = ["--no-index", "--find-links", str(source)] if source is not None else []
    command = (*PIP, "download", "--no-deps", "--dest", str(folder), *where, *words, *texts)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["pip failed"]
        place = "the index" if source is None else str(source)
        raise BoardError(
            f"no wheels of {', '.join(texts)} for Python {python} on {probe.machine} come from "
            f"{place}: {lines[-1].removeprefix('ERROR: ')}"
        )
    return sorted(folder.glob("*.whl"))


def own_wheel(folder: Path) -> Path:
    """Return Tandem's wheel: built of the checkout that this runs from, or of what is installed."""
    if not (ROOT / "pyproject.toml").exists():
        return _packed_again(folder)
    # A copy: a build leaves files beside its sources, which the next one would take in.
    source = folder / "source"
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=_LEFTOVERS)
        else:
            source.mkdir(exist_ok=True)
            shutil.copy(path, source)
    # A build in a fresh environment downloads setuptools; ours is taken where it is new enough.
    lacking = _lacking_to_build()
    isolation = [] if lacking else ["--no-build-isolation"]
    lock = lock_file(f"host-py{sys.version_info[0]}.{sys.version_info[1]}")
    versions = {} if lock is None else dict.fromkeys(PIP_CONSTRAINTS, str(lock))
    command = (*PIP, "wheel", "--no-deps", *isolation, "-w", str(folder), str(source))
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **versions}
    )
    shutil.rmtree(source)
    if done.returncode != 0:
        raise BoardError(f"cannot build the wheel of {ROOT}: {_why(done.stderr, lacking)}")
    return next(folder.glob("tandem_edge-*.whl"))


def _lacking_to_build() -> str:
    """Return what pyproject.toml builds with and this environment lacks, "" for nothing."""
    for row in map(Requirement, BUILD_REQUIRES):
        try:
            present: str | None = metadata.version(row.name)
        except metadata.PackageNotFoundError:
            present = None
        if not _fits(row, present):
            return f"it takes {row}, and here is {present or 'none'}"
    return ""


def _why(errors: str, lacking: str) -> str:
    """Return the cause of a failed build: pip's first error, not the hint at its end."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("ERROR: ")] or lines or ["pip failed"]
    cause = causes[0].removeprefix("ERROR: ")
    if lacking:
        cause = f"{lacking}, and pip could not download a newer one ({cause})"
    return f"{cause}; pip install '{BUILD_REQUIRES[0]}' here, or name a wheel with --wheel"


def _packed_again(folder: Path) -> Path:
    """Return the wheel that was installed, made again of its files; each must be as it came."""
    installed = next(
        (
            distribution
            for distribution in metadata.distributions(path=[str(ROOT)])
            if distribution.name == "tandem-edge"
        ),
        None,
    )
    files = None if installed is None else installed.files
    if installed is None or not files:
        raise BoardError(
            f"{ROOT} is no checkout, and pip has no list of its files there: name the wheel that "
            "you installed with --wheel"
        )
    wheel = folder / f"tandem_edge-{installed.version}-py3-none-any.whl"
    record: list[str] = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(files, key=str):
            if file.hash is None or ".." in file.parts or file.name in _OF_PIP:
                continue
            path = Path(str(file.locate()))
            try:
                data = path.read_bytes()
            except OSError as error:
                raise BoardError(f"cannot read {path} ({error.strerror}): {REINSTALL}") from error
            digest = hashlib.new(file.hash.mode, data).digest()
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                raise BoardError(f"{path} was changed after it was installed: {REINSTALL}")
            archive.writestr(zipfile.ZipInfo(file.as_posix()), data, zipfile.ZIP_DEFLATED)
            record.append(f"{file.as_posix()},{file.hash.mode}={file.hash.value},{len(data)}")
        name = next(row.split(",")[0] for row in record if ".dist-info/METADATA" in row)
        record_name = name.replace("METADATA", "RECORD")
        archive.writestr(zipfile.ZipInfo(record_name), "\n".join((*record, f"{record_name},,", "")))
    return wheel


def pip_wheel(folder: Path) -> Path:
    """Return a wheel of pip, for boards without one: Python brings it."""
    for path in sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")):
        return path
    command = (*PIP, "download", "--no-deps", "--dest", str(folder), "pip")
    subprocess.run(command, capture_output=True, check=False)
    for path in sorted(folder.glob("pip-*.whl")):
        return path
    raise BoardError("this host's Python brings no pip, and the index gives none: install pip here")


def content_digest(wheel: Path) -> str:
    """Return the SHA-256 of a wheel's list of files: the same for two builds of one source."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".dist-info/RECORD"))
            lines = sorted(archive.read(name).splitlines())
    except (OSError, zipfile.BadZipFile, StopIteration) as error:
        raise BoardError(f"{wheel} is no wheel: {error}") from error
    return hashlib.sha256(b"\n".join(lines)).hexdigest()
