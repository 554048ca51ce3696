"""A live board meets damaged pictures: the script that shows it, with some of its kinds."""

import json
import subprocess
import sys

import pytest

from scripts.bad_pictures import KINDS


def run(*options: str) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "scripts.bad_pictures", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return list(json.loads(done.stdout))


def test_a_live_release_stays_while_its_camera_gives_damaged_pictures() -> None:
    (outcome,) = run("--only", "JPEG that says 65500x65500", "--no-trial")
    assert "65500x65500" in str(outcome["answer"])


@pytest.mark.slow
def test_no_kind_of_picture_or_answer_moves_a_live_board() -> None:
    outcomes = run()
    assert len(outcomes) == len(KINDS) + 1 > 40
