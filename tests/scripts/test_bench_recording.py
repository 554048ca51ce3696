"""The figures of recordings are measured and printed with their goals."""

import json
from pathlib import Path

import pytest

from scripts import bench_recording


def test_it_prints_each_figure_with_its_goal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_recording, "PICTURES", 2)
    seen = bench_recording.measure("mcap", 12)
    assert seen["kb_per_frame"] > 100
    assert 0 < seen["memory_mb"] < 60
    bench_recording.main(["--frames", "6", "--json", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())
    assert len(rows) == 6
    assert [row["goal"] for row in rows].count(bench_recording.GOAL_CPU) == 2
    shown = capsys.readouterr().out
    assert all(row["what"] in shown for row in rows)
