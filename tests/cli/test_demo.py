"""The main job, whole: the demo in processes of its own, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.vision import cv2


@pytest.mark.slow  # scripts/test.sh runs the demo, too: with the oldest packages
def test_the_demo_works_and_leaves_what_it_promises(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "toolkit.cli", "demo", "--out", str(out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["passed"]
    assert all(check["passed"] for check in result["checks"])
    assert result["map50"]["fp32"] >= 0.90
    assert result["map50"]["fp32"] - result["map50"]["int8"] <= 0.02
    assert [item["phase"] for item in result["deployments"]] == ["live", "live", "rolled_back"]
    assert "boxes_of_another_model" in result["deployments"][2]["reason"]
    assert {"preprocess", "infer", "decode", "sinks"} <= set(result["stats"]["stage_p50_ms"])
    assert Path(result["engine"]).exists()
    video = cv2.VideoCapture(result["video"])
    assert int(video.get(cv2.CAP_PROP_FRAME_COUNT)) == 240
    page = Path(result["report"]).read_text()
    assert "Tandem demo: worked" in page
    assert page.count("data:image/jpeg;base64,") == 3


def test_a_source_that_is_not_there_ends_the_demo_in_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "toolkit.cli", "demo", "--out", str(tmp_path / "demo")]
    command += ["--source", "/nowhere/film.mp4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 1
    assert "/nowhere/film.mp4" in done.stderr
    assert "Traceback" not in done.stderr
