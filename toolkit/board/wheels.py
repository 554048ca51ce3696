"""Which packages a board lacks, and their wheels for its Python: from an index, or from a folder.

What the board's system has in a version that fits is never sent. pip judges conditions such as
`python_version < "3.11"` by the Python that it runs on, the host's; so the closure is made here,
by the board's.
"""

import ensurepip
import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from email.parser import Parser
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from toolkit.board.probe import Package, Probe
from toolkit.errors import BoardError

ROOT = Path(__file__).parents[2]
MAX_ROUNDS = 12  # of packages that ask for packages
OLDEST_GLIBC = {"aarch64": 17, "x86_64": 5}  # the minor of 2.x that the first wheels were for
NUMPY_1 = "numpy>=1.23,<2"  # beside JetPack's OpenCV and TensorRT, which were built with NumPy 1
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
    requirements = list(requirements_of(wheel, extras))
    wheels: dict[str, Path] = {}
    for _ in range(MAX_ROUNDS):
        lacking = missing(requirements, present, environment)
        if not lacking:
            return (wheel, *wheels.values())
        if "numpy" in lacking and _has_numpy_1(probe):
            lacking["numpy"] = Requirement(NUMPY_1)
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


def _has_numpy_1(probe: Probe) -> bool:
    return probe.packages.get("numpy", Package()).version.startswith("1.")


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
    """Return Tandem's wheel, built of the checkout that this runs from."""
    if not (ROOT / "pyproject.toml").exists():
        raise BoardError(
            "this Tandem does not run from a checkout, so that it cannot build its wheel: name the "
            "file that you installed with --wheel"
        )
    # A build in a fresh environment downloads setuptools; ours is taken where there is one.
    isolation = [] if importlib.util.find_spec("setuptools") is None else ["--no-build-isolation"]
    command = (*PIP, "wheel", "--no-deps", *isolation, "-w", str(folder), str(ROOT))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["pip failed"]
        raise BoardError(f"cannot build the wheel of {ROOT}: {lines[-1]}; name one with --wheel")
    return next(folder.glob("tandem_edge-*.whl"))


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
