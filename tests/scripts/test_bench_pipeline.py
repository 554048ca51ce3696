"""The benchmark of pipelines: its parts run, its clock is read right, its table tells misses."""

import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from pipelines.config import SourceConfig
from pipelines.sources.batching import read_frames
from scripts.bench_pipeline import Effort, Figure, measure, table
from scripts.pipeline_parts import OBJECTS, EngineDouble, camera, detector_pipeline, made_ns
from scripts.pipeline_peers import Peer

ROOT = Path(__file__).parents[2]


def test_a_short_run_prints_every_goal_of_a_stream_as_json() -> None:
    words = ("--json", "--seconds", "2", "--runs", "5", "--only", "G1", "G4", "G6")
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench_pipeline", *words],
        cwd=ROOT, capture_output=True, check=True, timeout=120,
    )  # fmt: skip
    figures = json.loads(done.stdout)["figures"]
    assert {row["id"] for row in figures} == {"G1", "G2", "G4", "G6", "G10", "G12"}
    assert all(row["ours"] > 0 for row in figures)
    made_to_received = next(row["ours"] for row in figures if row["id"] == "G1")
    assert made_to_received > 5.0  # the engine alone takes that long


def test_the_clock_in_a_picture_is_the_time_it_was_made() -> None:
    with camera() as server:
        begin_ns = time.monotonic_ns()
        with read_frames(SourceConfig(uri=server.url)) as frames:
            times_ns = [made_ns(next(frames).image) for _ in range(5)]
    assert begin_ns < times_ns[0]
    assert times_ns[-1] < time.monotonic_ns()
    assert all(0 < after - before < 10e9 for before, after in pairwise(times_ns))


def test_the_engine_s_double_gives_as_many_objects_as_it_says() -> None:
    from pipelines.frame import Frame, Stamp
    from pipelines.runtime.batch import BatchRunner, Model
    from scripts.pipeline_parts import LABELS

    runner = BatchRunner(
        detector_pipeline(SourceConfig(uri="test://", id="a")), Model(EngineDouble(0.0), LABELS, "")
    )
    frame = Frame(np.zeros((360, 640, 3), np.uint8), 0, Stamp.now(), Stamp.now(), "a", "a")
    (result,) = runner.run([frame], ())
    assert len(result.decoded.scores) == OBJECTS


def test_the_table_says_which_goals_are_missed_and_what_cannot_run() -> None:
    figures = [
        Figure("G1", "a time", 10.0, "ms", "20", 10.5),
        Figure("G9", "a rate", 115.0, "FPS", "30", 115.0, at_least=True),
    ]
    text = table(figures, [Peer("G5", "tracker", None, "trackers cannot be imported")])
    assert "| G1 | a time | <= 10 ms | 10.5 | MISSED | 20 |" in text
    assert "| G9 | a rate | >= 115 FPS | 115 | holds | 30 |" in text
    assert "trackers cannot be imported" in text


def test_stages_are_measured_without_a_camera() -> None:
    figures = measure(["G5"], Effort(1.0, 5))
    assert [figure.id for figure in figures] == ["G5"]
    assert 0.0 < figures[0].ours < 1000.0
