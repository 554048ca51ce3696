"""The benchmark of work on several machines measures what it says."""

import json
from typing import Any

import pytest

from scripts import bench_scale


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert bench_scale.main(words) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_a_matrix_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--models", "1", "--samples", "8", "--profiles", "laptop", "--precisions", "fp32")
    actual = figures(capsys, "builds", *words)
    assert (actual["engines"], actual["engines_when_killed"]) == (1, 1)
    assert 0 < actual["second_to_first"] < 1


def test_agents_that_all_come_back_at_once_are_there_within_five_minutes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """2,000 clients and a broker that is fifty times slower, for 100,000 and one core."""
    actual = figures(capsys, "storm", "--clients", "2000", "--handshake-ms", "75")
    assert 150.0 <= actual["all_s"] <= 300.0


@pytest.mark.slow
def test_a_calibration_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    actual = figures(capsys, "calibrate", "--samples", "600", "--workers", "2", "--kill", "1")
    assert actual["killed"] == 1


def test_a_farm_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--boards", "6", "--tactics", "10", "--die", "0", "--lie", "1", "--lease-s", "600")
    actual = figures(capsys, "farm", *words)
    assert (actual["tactics"], actual["dead"], len(actual["liars"])) == (10, [], 1)
    assert actual["worst_error"] <= actual["stated_error"] < 0.25
    assert actual["messages"] >= 4 * actual["jobs"]
