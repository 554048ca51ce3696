"""Which NumPy a board gets beside its OpenCV: cv2 is asked, on the page, in the kit and by init."""

import ast
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import cv2
import msgspec
import pytest

from device import numpy_bound
from device.numpy_bound import ANY_NUMPY, NUMPY_1
from toolkit.fleet.boards.probe import Probe, probe_script
from toolkit.fleet.boards.wheels import own_wheel

ROOT = Path(__file__).parents[2]

# What the extensions of opencv-python 4.8.1 and 4.12.0 hold, and that of Debian 12 as 4.8.1.
OF_NUMPY_1 = b"\x7fELF\0numpy.core._multiarray_umath\0numpy.core.multiarray failed to import\0"
OF_NUMPY_2 = b"\x7fELF\0numpy._core._multiarray_umath\0numpy.core._multiarray_umath\0"
SYSTEM = f"cv2{sysconfig.get_config_var('EXT_SUFFIX')}"
JETPACK = f"cv2/python-3.10/{SYSTEM}"


def ask(folder: Path, files: dict[str, bytes]) -> str:
    """What a Python says that has these packages alone."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    done = subprocess.run(
        (sys.executable, "-S", numpy_bound.__file__),
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(folder)},
    )  # fmt: skip
    return done.stdout.strip()


def numpy_of(version: str) -> dict[str, bytes]:
    text = f"Metadata-Version: 2.1\nName: numpy\nVersion: {version}\n"
    return {"numpy/__init__.py": b"", f"numpy-{version}.dist-info/METADATA": text.encode()}


@pytest.mark.parametrize(
    ("files", "bound"),
    [
        ({SYSTEM: OF_NUMPY_1}, NUMPY_1),
        ({JETPACK: OF_NUMPY_1, "cv2/__init__.py": b"raise ImportError"}, NUMPY_1),
        ({JETPACK: OF_NUMPY_1, "cv2/__init__.py": b"", **numpy_of("2.2.6")}, NUMPY_1),
        ({"cv2/cv2.abi3.so": OF_NUMPY_2, "cv2/__init__.py": b""}, ANY_NUMPY),
        ({"cv2/cv2.abi3.so": OF_NUMPY_2, "cv2/__init__.py": b"", **numpy_of("1.26.4")}, ANY_NUMPY),
        ({}, ANY_NUMPY),
        # opencv-python, which `--extra camera` brings there, wants NumPy 2.
        (numpy_of("1.24.2"), ANY_NUMPY),
        (numpy_of("2.4.0"), ANY_NUMPY),
        # What lies beside it says nothing.
        ({JETPACK: OF_NUMPY_2, "cv2/__init__.py": b"", "cv2/libx.so": OF_NUMPY_1}, ANY_NUMPY),
    ],
)
def test_cv2_is_asked_which_numpy_it_loads_beside(
    tmp_path: Path, files: dict[str, bytes], bound: str
) -> None:
    assert ask(tmp_path, files) == bound


def test_the_cv2_that_is_here_is_what_it_says_itself() -> None:
    line = next(row for row in cv2.getBuildInformation().splitlines() if " numpy:" in row)
    generation = int(line.partition("(ver ")[2].partition(".")[0])
    assert numpy_bound.cv2_numpy() == generation
    assert numpy_bound.numpy_bound() == (NUMPY_1 if generation == 1 else ANY_NUMPY)


def test_the_file_runs_on_any_python_3() -> None:
    ast.parse(Path(numpy_bound.__file__).read_text(), feature_version=(3, 6))
    ast.parse(probe_script(), feature_version=(3, 6))


def test_a_board_is_asked_for_it_as_it_is_set_up() -> None:
    done = subprocess.run(
        (sys.executable, "-s", "-"), input=probe_script().encode(), capture_output=True, check=True
    )
    assert msgspec.json.decode(done.stdout, type=Probe).numpy == numpy_bound.numpy_bound()


@pytest.mark.slow
def test_the_commands_of_the_page_install_the_agent(tmp_path: Path) -> None:
    text = (ROOT / "docs/board.md").read_text()
    blocks = re.findall(r"```console\n(.*?)```", text.partition("### Debian package")[0], re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert lines[0] == "host$ pip wheel --no-deps -w dist ."
    commands = [line.removeprefix("board$ ") for line in lines if line.startswith("board$ ")]
    assert commands[-1].startswith("/opt/tandem/bin/tandem doctor")
    # A board: root rights and packages of its own; what this Python has, it sees.
    doubles = {"sudo": 'exec "$@"', "apt-get": "true", "python3": f'exec "{sys.executable}" "$@"'}
    (tmp_path / "bin").mkdir()
    for name, line in doubles.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    own_wheel(tmp_path)
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    script = "\n".join(commands[:-1]).replace("/opt/tandem", str(tmp_path / "venv"))
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": packages,
    }
    done = subprocess.run(
        ("bash", "-ec", script),
        cwd=tmp_path, capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "numpy.txt").read_text().strip() in (ANY_NUMPY, NUMPY_1)
    assert (tmp_path / "venv/bin/tandem-agent").exists()
