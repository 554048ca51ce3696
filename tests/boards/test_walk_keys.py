"""docs/keys.md word by word: CI publishes without a director's key, and a backup is restored."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mqtt_fixtures import make_bundle
from ssh_fixtures import ROOT

from device.errors import TandemError
from toolkit.cli.main import tandem

BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/keys.md").read_text(), re.DOTALL)


def follow(block: str) -> None:
    """Run a block as the page has it, with the tandem of this Python."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-e", "-c", block], env={**os.environ, "PATH": path}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_ci_publishes_operators_deploy_and_a_backup_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    follow("tandem fleet init fleet --root-keys 2 --threshold 2")
    make_bundle(tmp_path / "in").rename(tmp_path / "robot.bundle")
    give, publish, backup = BLOCKS
    follow(give)
    assert not (tmp_path / "ci" / "keys" / "director.pem").exists()
    follow(publish)
    names = {path.name for path in (tmp_path / "fleet/repository/metadata").iterdir()}
    assert "2.targets.json" in names
    # The operator cannot publish any more, and keeps all fresh.
    second = make_bundle(tmp_path / "in", version="2")
    with pytest.raises(TandemError, match=r"targets\.pem"):
        tandem.main(["fleet", "publish", str(second), "--fleet", "fleet"], standalone_mode=False)
    follow("tandem fleet refresh --fleet fleet")
    follow(backup)
    assert (tmp_path / "backup.tar.gz").stat().st_mode & 0o077 == 0
    restored = tmp_path / "restored" / "fleet"
    assert (restored / "keys" / "director.pem").read_bytes() == (
        tmp_path / "fleet" / "keys" / "director.pem"
    ).read_bytes()
