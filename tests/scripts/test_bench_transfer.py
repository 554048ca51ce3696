"""The benchmark of downloads runs, and its figures that do not depend on the machine hold."""

import json
from pathlib import Path

import pytest

from scripts import bench_transfer


def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> dict[str, float]:
    out = tmp_path / "figures.json"
    words = ("bench_transfer", "--runs", "1", "--json", str(out))
    monkeypatch.setattr("sys.argv", [*words, *more])
    bench_transfer.main()
    return {row["name"]: row["ours"] for row in json.loads(out.read_text())["rows"]}


def test_downloads_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = figures(tmp_path, monkeypatch, "--mib", "8", "--parts", "resume")
    assert ours["bytes sent again after SIGKILL"] == 0


@pytest.mark.slow
def test_every_part_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = figures(tmp_path, monkeypatch, "--mib", "8")
    assert len(ours) == 12  # one name is there for each line
    assert min(value for name, value in ours.items() if "SIGKILL" not in name) > 0


def test_differences_are_as_small_as_the_goals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = figures(tmp_path, monkeypatch, "--mib", "8", "--parts", "delta")
    assert ours["sent: FP32, head only"] <= 3
    assert ours["sent: FP32, head, header 356 B longer"] <= 3
    assert ours["sent: FP16, all moved 1 %"] <= 57
    assert ours["sent: INT8, all moved 1 %"] <= 22
