"""Releases of the agent itself: wheels in a bundle, and which boards they fit."""

from collections.abc import Sequence
from pathlib import Path

from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from device.errors import BundleError
from device.update.agent_payload import OWN_WHEEL, AgentPayload
from device.update.bundle import BundleInfo, write_agent_bundle

MIN_PYTHON = "3.10"  # of Tandem itself
_GLIBC_OF = {"manylinux2014": "2.17", "manylinux2010": "2.12", "manylinux1": "2.5"}


def pack_agent(
    output: Path, folder: Path, version: str, *, min_l4t: str = "", below_l4t: str = ""
) -> BundleInfo:
    """Write the wheels of a folder as a release of the agent.

    `version`: "" for that of Tandem's wheel. Raises BundleError: no wheel of Tandem is there, or
    no board can take all of them.
    """
    wheels = sorted(folder.glob("*.whl"))
    agent_wheels = [path for path in wheels if path.name.startswith(OWN_WHEEL)]
    if len(agent_wheels) != 1:
        raise BundleError(
            f"{folder} has {len(agent_wheels)} wheels of tandem-edge, expected 1: `pip download "
            "tandem-edge` for the board's Python and platform gathers a set"
        )
    payload = payload_of([path.name for path in wheels], min_l4t=min_l4t, below_l4t=below_l4t)
    version = version or str(_tags(agent_wheels[0].name)[0])
    return write_agent_bundle(output, wheels=wheels, version=version, payload=payload)


def payload_of(names: Sequence[str], *, min_l4t: str = "", below_l4t: str = "") -> AgentPayload:
    """Return which boards take all wheels of these names. Raises BundleError: none does."""
    least, below, glibc, machines = MIN_PYTHON, "", "2.0", set[str]()
    for name in names:
        _, tags = _tags(name)
        machine, platform_glibc = _platform(name, tags)
        machines |= {machine} - {""}
        glibc = max(glibc, platform_glibc, key=Version)
        python, exact = _python(name, tags)
        least = max(least, python, key=Version)
        if exact:
            major, minor = map(int, python.split("."))
            below = min(filter(None, (below, f"{major}.{minor + 1}")), key=Version)
    if len(machines) > 1:
        raise BundleError(f"the wheels are for {' and '.join(sorted(machines))}: give one set each")
    if below and Version(least) >= Version(below):
        raise BundleError(f"the wheels need Python {least} or newer, and one older than {below}")
    return AgentPayload(
        min_python=least,
        below_python=below,
        min_l4t=min_l4t,
        below_l4t=below_l4t,
        min_glibc="" if glibc == "2.0" else glibc,
        machine="".join(machines),
    )


def _tags(name: str) -> tuple[Version, frozenset[Tag]]:
    try:
        _, version, _, tags = parse_wheel_filename(name)
    except InvalidWheelFilename as error:
        raise BundleError(f"{name} is no wheel: {error}") from error
    return version, tags


def _platform(name: str, tags: frozenset[Tag]) -> tuple[str, str]:
    """Return the machine and the oldest glibc of a wheel; "" and 2.0 for one without native code.

    Of several tags the one with the oldest glibc counts.
    """
    rows = []
    for tag in tags:
        if tag.platform == "any":
            return "", "2.0"
        head, _, rest = tag.platform.partition("_")
        if head == "manylinux":
            major, minor, machine = rest.split("_", 2)
            rows.append((f"{major}.{minor}", machine))
        elif head in _GLIBC_OF or head == "linux":
            rows.append((_GLIBC_OF.get(head, "2.0"), rest))
    if not rows:
        raise BundleError(f"{name} is for no Linux with glibc: boards cannot take it")
    glibc, machine = min(rows, key=lambda row: Version(row[0]))
    return machine, glibc


def _python(name: str, tags: frozenset[Tag]) -> tuple[str, bool]:
    """Return the Python of a wheel, and whether it is the only one."""
    rows = set()
    for tag in tags:
        digits = tag.interpreter.removeprefix("cp")
        if tag.interpreter.startswith("py3") and tag.abi == "none":
            return "3.0", False
        if tag.interpreter.startswith("cp3") and digits[1:].isdigit():
            rows.add((f"3.{digits[1:]}", tag.abi != "abi3"))
    if not rows:
        raise BundleError(f"{name} is for no CPython 3: boards cannot take it")
    return min(rows, key=lambda row: Version(row[0]))
