"""The scripts of pages run, small: what viewers of a fleet cost, and the pictures of docs."""

import json
from pathlib import Path

import pytest

from scripts import bench_fleet_viewers, web_pictures


def test_viewers_are_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["x", "--devices", "60", "--viewers", "2", "--seconds", "1", "--json"]
    monkeypatch.setattr("sys.argv", words)
    bench_fleet_viewers.main()
    figures = json.loads(capsys.readouterr().out)
    assert figures["devices"] == 60
    assert 0.0 < figures["page_kb"] < 100.0
    assert 0.0 < figures["change_p95_ms"] < 10_000.0


def test_pictures_are_drawn(tmp_path: Path) -> None:
    web_pictures.draw_plan(tmp_path)
    web_pictures.draw(tmp_path, 20)
    for name in (web_pictures.PLAN_PICTURE, *web_pictures.PICTURES):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
