"""The measurement of pages and lists on a small fleet."""

import json

import pytest

from scripts import bench_fleet_web


def test_every_page_and_list_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_fleet_web.main(["--devices", "120", "--runs", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) > 20
    assert all(row["wall_ms"] > 0.0 and row["reached"] for row in rows)


def test_what_is_too_slow_is_said() -> None:
    assert not bench_fleet_web.Row("x", 301.0, 1.0).reached
