"""What a board has before anything is installed: asked of its own Python, in one go."""

from pathlib import Path

import msgspec

from device import numpy_bound
from device.agent.facts import jetpack_of
from device.board_files import l4t_of
from device.profile import profile_of_parts
from toolkit.errors import BoardError
from toolkit.fleet.boards.shell import Shell

OLDEST_PYTHON = (3, 10)
NEEDED_MB = 500  # environment, packages and what pip unpacks on its way
SYSTEM_PACKAGES = ("numpy", "cv2", "tensorrt")  # JetPack's: they stay as they are


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """A package of the board's own Python. `digest`: of the names, sizes and times of its files."""

    version: str = ""
    path: str = ""
    digest: str = ""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A board as it is. `distributions`: version by name, of its own Python; MB are 10^6 bytes.

    `numpy`: the constraint that its cv2 puts on NumPy.
    """

    python: tuple[int, int, int]
    abi: str  # cp310
    machine: str  # aarch64
    glibc: str
    free_mb: int
    model: str
    compatible: str
    serial: str
    nv_release: str
    host: str
    systemd: bool
    packages: dict[str, Package]
    distributions: dict[str, str]
    numpy: str

    @property
    def jetpack(self) -> str:
        """The JetPack, or the L4T where that is not known; "" on another machine."""
        l4t = l4t_of(self.nv_release)
        return jetpack_of(l4t) or (f"L4T {l4t}" if l4t else "")

    @property
    def profile(self) -> str:
        """The name of the profile that the part number has, "" if none fits."""
        profile = profile_of_parts(self.compatible)
        return "" if profile is None else profile.name


# Runs on the Python of any JetPack, 3.6 too: it is there to say that this one is too old.
SCRIPT = r"""
import hashlib, json, os, platform, sys
from importlib import util

def text(path):
    try:
        with open(path, errors="replace") as file:
            return file.read().strip("\0\n ")
    except OSError:
        return ""

def package(name, distributions):
    try:
        spec = util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        return {}
    folder = os.path.dirname(spec.origin) if spec.submodule_search_locations else spec.origin
    rows = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for file in sorted(files):
            path = os.path.join(place, file)
            state = os.lstat(path)
            inside = os.path.relpath(path, folder)
            rows.append("%s %d %d" % (inside, state.st_size, state.st_mtime_ns))
    if not rows:
        state = os.stat(folder)
        rows = ["%d %d" % (state.st_size, state.st_mtime_ns)]
    names = {"cv2": ("opencv-python", "opencv-python-headless", "opencv")}.get(name, (name,))
    version = next((distributions[n] for n in names if n in distributions), "")
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    return {"version": version, "path": spec.origin, "digest": digest}

try:
    from importlib import metadata
    found = {}
    for one in reversed(list(metadata.distributions())):
        if one.metadata["Name"]:
            found[one.metadata["Name"].lower().replace("_", "-").replace(".", "-")] = one.version
except ImportError:
    found = {}
disk = os.statvfs("/opt" if os.path.isdir("/opt") else "/")
print(json.dumps({
    "python": list(sys.version_info[:3]),
    "abi": "cp%d%d" % sys.version_info[:2],
    "machine": platform.machine(),
    "glibc": platform.libc_ver()[1],
    "free_mb": disk.f_bavail * disk.f_frsize // 10**6,
    "model": text("/proc/device-tree/model"),
    "compatible": text("/proc/device-tree/compatible"),
    "serial": text("/proc/device-tree/serial-number"),
    "nv_release": text("/etc/nv_tegra_release"),
    "host": platform.node(),
    "systemd": any(os.access(os.path.join(path, "systemctl"), os.X_OK)
                   for path in os.environ["PATH"].split(os.pathsep)),
    "packages": {name: package(name, found) for name in PACKAGES},
    "distributions": found,
    "numpy": numpy_bound(),
}))
"""


def probe_script() -> str:
    """Return what a board's Python is asked, with all that it needs for the answer."""
    source_text = Path(numpy_bound.__file__).read_text().partition('if __name__ == "__main__"')[0]
    return f"{source_text}\nPACKAGES = {SYSTEM_PACKAGES!r}\n{SCRIPT}"


def probe_board(shell: Shell) -> Probe:
    """Ask a board what it has. BoardError: it has no Python 3, or its answer is not understood."""
    # -s: what the login has below ~/.local is not there for the agent's user.
    done = shell.run("exec python3 -s -", probe_script().encode())
    if done.status != 0:
        raise BoardError(f"{shell.name} has no Python 3 that runs: {done.last_line}")
    try:
        return msgspec.json.decode(done.stdout, type=Probe)
    except ValueError as error:
        raise BoardError(
            f"the answer of {shell.name} is not understood ({error}): its shell must print nothing "
            "of its own; take greetings out of its .bashrc"
        ) from error


def check_probe(probe: Probe, name: str) -> None:
    """Refuse a board that cannot run the agent; BoardError names the limit and the value."""
    if probe.python[:2] < OLDEST_PYTHON:
        python = ".".join(map(str, probe.python))
        raise BoardError(
            f"{name} has Python {python}, the agent needs 3.10: JetPack 6 or newer has it; for "
            "an older one see the page on JetPack 5"
        )
    if not probe.systemd:
        raise BoardError(
            f"{name} has no systemctl, which starts the agent: it needs a system with systemd"
        )
    if probe.free_mb < NEEDED_MB:
        raise BoardError(
            f"{name} has {probe.free_mb} MB free below /opt, {NEEDED_MB} MB are needed while the "
            "agent is installed: make room there"
        )


def changed_packages(before: Probe, after: Probe) -> tuple[str, ...]:
    """Return the system packages whose files are other ones than before."""
    return tuple(
        name
        for name in SYSTEM_PACKAGES
        if before.packages.get(name, Package()) != after.packages.get(name, Package())
    )


def describe_packages(probe: Probe) -> str:
    """Return the system packages with their versions, for a line."""
    present = [
        f"{name} {package.version or 'of unknown version'}"
        for name, package in probe.packages.items()
        if package.path
    ]
    absent = [name for name, package in probe.packages.items() if not package.path]
    text = ", ".join(present) or "none of them is there"
    return f"{text}; not there: {', '.join(absent)}" if present and absent else text
