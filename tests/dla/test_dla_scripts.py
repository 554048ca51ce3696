"""The scripts about the DLA's arithmetic run, and their tables hold what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.dla_causes import experiment_rows
from scripts.dla_causes_subjects import Detections, _f1, overlap

ROOT = Path(__file__).parents[2]
LIMIT_S = 300


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=LIMIT_S, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bench_emulator_times_every_subject() -> None:
    out = run("scripts.bench_emulator", "--runs", "1", "--samples", "1", "--networks",
        "robot-objects")  # fmt: skip
    lines = out.splitlines()
    assert "nodes on the DLA" in lines[0]
    ratios = {line[:24].strip(): float(line.split()[-2]) for line in lines[2:]}
    assert ratios.pop("onnxruntime INT8") == 1.0
    assert set(ratios) == {"fast", "exact", "fast, ideal scales"}
    assert min(ratios.values()) > 0


@pytest.mark.slow
def test_causes_are_measured_one_by_one() -> None:
    out = run("scripts.dla_causes", "--models", "robot-objects", "--samples", "2", "--judged", "1",
        "--json")  # fmt: skip
    rows = json.loads(out)["models"]["robot-objects"]
    assert [row["cause"] for row in rows[:2]] == ["FP32", "INT8 as on a GPU"]
    assert all(0 <= row["points"] <= 100 for row in rows)
    gpu = rows[1]["points"]
    alone = [row for row in rows if row["left_out"] is not None]
    assert len(alone) == 9
    assert all(row["alone"] == pytest.approx(gpu - row["points"]) for row in alone)


def test_the_first_run_of_a_detector_without_truths_is_fp32() -> None:
    runs: list[str] = []

    class Recorded:
        """An experiment that says what it is asked for."""

        def fp32(self) -> float:
            runs.append("FP32")
            return 100.0

        def points(self, causes: object, arithmetic: str = "") -> float:
            runs.append(f"{arithmetic} {causes}")
            return 50.0

    experiment_rows(Recorded())
    assert runs[0] == "FP32"
    assert len(runs) > 10


def detections(*boxes: tuple[float, float, float, float], classes: list[int]) -> Detections:
    result = np.array(boxes, np.float32).reshape(-1, 4)
    return Detections(result, np.full(len(result), 0.9), np.array(classes))


def test_f1_counts_a_detection_once_and_of_its_class() -> None:
    one, far = (0.0, 0.0, 10.0, 10.0), (50.0, 50.0, 60.0, 60.0)
    truth = detections(one, far, classes=[0, 1])
    assert _f1([truth], [truth]) == 1.0
    assert _f1([truth], [detections(one, one, classes=[0, 0])]) == 0.5
    assert _f1([truth], [detections(one, far, classes=[0, 2])]) == 0.5
    assert _f1([truth], [detections(classes=[])]) == 0.0
    assert overlap(np.array(one), np.array([0, 0, 10, 5])) == pytest.approx(0.5)
