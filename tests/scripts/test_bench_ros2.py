"""The benchmark of the ros2 sink, with few frames."""

import json
from pathlib import Path

from scripts import bench_ros2


def test_each_row_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    status = bench_ros2.main(["--frames", "20", "--hz", "50", "--runs", "1", "--json", str(out)])
    assert status == 0
    encoding, zenoh, dds, memory = json.loads(out.read_text())
    assert 0.0 < encoding["encode_us"] < encoding["rosbags_us"]
    assert all(0.0 < row["p50_ms"] <= row["p99_ms"] for row in (zenoh, dds))
    assert {"zenoh_mb", "dds_mb"} <= memory.keys()
