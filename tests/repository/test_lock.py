"""The files of tested versions: what they hold, and the script that makes them."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from wheel_fixtures import empty_wheel

from scripts import lock

ROOT = Path(__file__).parents[2]


def test_each_row_has_its_file_of_versions_alone() -> None:
    assert {path.stem for path in lock.FOLDER.iterdir()} == {row.name for row in lock.LOCKS}
    for path in lock.FOLDER.iterdir():
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert lines, path
        assert all(line.count("==") == 1 and "[" not in line for line in lines), path


@pytest.mark.skipif(
    importlib.util.find_spec("uv") is None and shutil.which("uv") is None,
    reason="uv is missing: pip install -e '.[dev]'",
)
def test_a_version_is_kept_until_an_upgrade(tmp_path: Path) -> None:
    place, out = tmp_path / "wheels", tmp_path / "locks"
    place.mkdir()
    out.mkdir()
    project = tmp_path / "pyproject.toml"
    project.write_text(
        '[project]\nname = "p"\nversion = "1"\n'
        '[project.optional-dependencies]\nhost = ["one>=1"]\nopenvino = []\n'
    )
    for version in ("1.0", "1.1"):
        empty_wheel(place, "one", version, "py3-none-any")
    empty_wheel(place, "setuptools", "77.0", "py3-none-any")
    (out / "host-py3.10.txt").write_text("one==1.0\n")
    words = ["host-py3.10", "--project", str(project), "--out", str(out)]
    offline = ["--", "--no-index", "--offline", "--find-links", str(place)]
    lock.main([*words, *offline])
    assert "one==1.0\nsetuptools==77.0\n" in (out / "host-py3.10.txt").read_text()
    lock.main([*words, "--upgrade", *offline])
    assert "one==1.1\n" in (out / "host-py3.10.txt").read_text()


def test_an_unknown_file_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.lock", "nosuch"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "no file nosuch; there are dev-py3.10" in done.stderr


def test_the_scripts_of_environments_pass_shellcheck() -> None:
    names = ("demo.sh", "test.sh", "test_newest.sh", "test_oldest.sh")
    paths = [str(ROOT / "scripts" / name) for name in names]
    command = ["shellcheck", "-x", "-s", "bash", "-e", "SC2119", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
