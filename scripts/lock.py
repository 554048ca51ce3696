"""Write the tested version of every dependency into configs/locks: `python -m scripts.lock`.

A version that a file has stays there as long as it fits what pyproject.toml asks for; `--upgrade`
takes the newest. Names choose some of the files. uv resolves, for any Python and machine from here;
what follows `--` goes to it.
"""

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.importers.tensorflow import REQUIREMENTS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "configs" / "locks"
HOST = "x86_64-manylinux_2_28"
PYTHONS = ("3.10", "3.11", "3.12")
# What makes and runs the tests of a Python without the extra `dev`.
TESTS = ("hypothesis>=6.100", "pytest>=8.2", "pytest-timeout>=2.3")
BUILD = ("setuptools>=77",)  # what pyproject.toml builds with
# The tests use PyTorch for CPUs. PyPI's wants an older Triton, and CUDA's libraries.
OVERRIDE = "triton>=3.8\n"
OF_CUDA = ("cuda-", "nvidia-")


@dataclass(frozen=True, slots=True)
class Lock:
    """A file of versions: for the extras of Tandem and other packages, on a Python and machine."""

    name: str
    python: str
    machine: str
    extras: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    oldest: bool = False


LOCKS = (
    *(Lock(f"dev-py{p}", p, HOST, ("dev", "gpu-build", "openvino"), BUILD) for p in PYTHONS),
    *(Lock(f"host-py{p}", p, HOST, ("host", "openvino"), BUILD) for p in PYTHONS),
    *(Lock(f"tensorflow-py{p}", p, HOST, (), REQUIREMENTS) for p in PYTHONS),
    *(Lock(f"oldest-py{p}", p, HOST, ("host",), (*TESTS, *BUILD), oldest=True) for p in PYTHONS),
    # Beside JetPack's own packages, which were built with NumPy 1.
    *(
        Lock(
            f"jetpack{jetpack}", python, f"aarch64-manylinux_{glibc}",
            ("fleet", "foxglove", "mcap", "portable", "ros2", "serial", "serve"),
            (*BUILD, "numpy<2"),
        )
        for jetpack, python, glibc in ((6, "3.10", "2_35"), (7, "3.12", "2_39"))
    ),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="[default: all]")
    parser.add_argument("--upgrade", action="store_true", help="take the newest")
    parser.add_argument("--project", type=Path, default=ROOT / "pyproject.toml")
    parser.add_argument("--out", type=Path, default=FOLDER)
    words = list(sys.argv[1:] if arguments is None else arguments)
    split = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:split])
    known = {lock.name: lock for lock in LOCKS}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no file {', '.join(unknown)}; there are {', '.join(known)}")
    for name in options.names or known:
        text = resolve(
            known[name], options.project, options.out, words[split + 1 :], upgrade=options.upgrade
        )
        (options.out / f"{name}.txt").write_text(text)
        print(f"{name}: {sum('==' in line for line in text.splitlines())} packages")
    return 0


def resolve(
    lock: Lock, project: Path, folder: Path, more: Sequence[str] = (), *, upgrade: bool = False
) -> str:
    """Return the text of a file: each package with its version. Exits with what uv says."""
    extras = [word for extra in lock.extras for word in ("--extra", extra)]
    before = folder / f"{lock.name}.txt"
    command = [
        *_uv(), "pip", "compile", "-q", *([str(project)] if extras else []), "-", *extras,
        "--python-version", lock.python, "--python-platform", lock.machine,
        "--no-annotate", "--no-header", "--no-config", "--no-sources",
        *(["--upgrade"] if upgrade else []),
        *(["--resolution=lowest-direct", "--only-binary=:all:"] if lock.oldest else []), *more,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "lock.txt"  # uv prefers the versions that stand there
        if before.exists() and not lock.oldest:
            shutil.copy(before, out)
        override = Path(work) / "override.txt"
        override.write_text(OVERRIDE)
        done = subprocess.run(
            [*command, "-o", str(out), "--override", str(override)],
            input="\n".join(lock.also), capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            sys.exit(f"{lock.name}: {done.stderr.strip()}")
        rows = [line for line in out.read_text().splitlines() if "==" in line]
    rows = [row for row in rows if not row.startswith(OF_CUDA)]
    about = f"# Python {lock.python} on {lock.machine}: python -m scripts.lock {lock.name}"
    return "\n".join((about, *(_without_extras(row) for row in rows), ""))


def _without_extras(row: str) -> str:
    """Return a row as a constraint, which may name no extras: `a[b]==1` -> `a==1`."""
    name, _, version = row.partition("==")
    return f"{name.partition('[')[0]}=={version}"


def _uv() -> tuple[str, ...]:
    if importlib.util.find_spec("uv") is not None:
        return (sys.executable, "-m", "uv")
    uv = shutil.which("uv")
    if uv is None:
        sys.exit("uv is missing: pip install -e '.[dev]' brings it")
    return (uv,)


if __name__ == "__main__":
    sys.exit(main())
