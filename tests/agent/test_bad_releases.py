"""The script of bad releases, on a few of its rows; the others take minutes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bad_releases import ROWS, Outcome, table

ROOT = Path(__file__).parents[2]


def outcomes_of(*words: str) -> list[Outcome]:
    command = [sys.executable, "-m", "scripts.bad_releases", "--json", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return [Outcome(**row) for row in json.loads(done.stdout)]


def test_a_release_that_freezes_in_its_trial_is_never_live() -> None:
    (outcome,) = outcomes_of("--only", "freezes by SIGSTOP", "--when", "trial")
    # A loaded machine takes longer: the time is the slow test's.
    assert outcome.wrong in ("", "more than 5 s"), outcome
    assert "SIGSTOP" in outcome.says


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whatever_a_release_does_something_gives_frames_within_five_seconds() -> None:
    outcomes = outcomes_of()
    assert len(outcomes) == len(ROWS) >= 26
    assert not [outcome for outcome in outcomes if outcome.wrong], table(outcomes)
