"""A live board meets damaged pictures: the script that shows it, with some of its kinds."""

import json
from collections.abc import Callable

import pytest

from scripts.bad_pictures import KINDS, main

Run = Callable[..., list[dict[str, object]]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def outcomes(*options: str) -> list[dict[str, object]]:
        status = main(["--json", *options])
        shown = capsys.readouterr().out
        assert status == 0, shown
        return list(json.loads(shown))

    return outcomes


def test_a_live_release_stays_while_its_camera_gives_damaged_pictures(run: Run) -> None:
    (outcome,) = run("--only", "JPEG that says 65500x65500", "--no-trial")
    assert "65500x65500" in str(outcome["answer"])


@pytest.mark.slow
def test_no_kind_of_picture_or_answer_moves_a_live_board(run: Run) -> None:
    outcomes = run()
    assert len(outcomes) == len(KINDS) + 1 > 40
