"""TUF's own conformance suite through the board's check, over each transport."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITE = os.environ.get("TANDEM_TUF_CONFORMANCE", "")
CASES = 113  # of tuf-conformance 2.4.0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not SUITE, reason="TANDEM_TUF_CONFORMANCE does not name the suite's folder")
@pytest.mark.parametrize("transport", ["http", "folder", "mqtt"])
def test_every_case_passes(transport: str) -> None:
    done = subprocess.run(
        ["bash", ROOT / "scripts/tuf_conformance.sh", SUITE, transport],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= CASES
    assert not re.search(r"failed|xfailed|skipped|error", done.stdout.splitlines()[-1])


def test_a_folder_that_is_not_the_suite_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", ROOT / "scripts/tuf_conformance.sh", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"{tmp_path} is not the suite" in done.stderr
