"""The benchmark of the agent runs and judges by its goals."""

import json

import pytest

from scripts import bench_agent


@pytest.mark.slow
def test_the_benchmark_measures_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    bench_agent.main(["--idle-s", "2", "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["name"] for row in rows] == [
        "import",
        "start to online",
        "idle load, no release",
        "RSS, signed release live",
        "highest RSS",
        "load, pipeline running",
    ]
    assert all(row["value"] > 0.0 for row in rows)


@pytest.mark.parametrize(("value", "passed"), [(40.0, True), (40.1, False)])
def test_a_row_is_judged_at_its_goal(value: float, passed: bool) -> None:
    assert bench_agent.Row("RSS", "MiB", 40.0, value).passed == passed
    assert bench_agent.Row("told", "MiB", None, value).passed
