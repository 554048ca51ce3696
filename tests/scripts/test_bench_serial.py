"""The benchmark of serial uploads, on a small file."""

import json
from pathlib import Path

from scripts import bench_serial


def test_each_row_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    assert bench_serial.main(["--mb", "0.2", "--runs", "1", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert [row["name"] for row in rows] == [row.name for row in bench_serial.ROWS]
    assert all(row["ours_mb_s"] > 0.0 for row in rows)
