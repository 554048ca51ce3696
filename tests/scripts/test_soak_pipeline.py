"""Pipelines that run for long, and through faults: nothing grows, nothing leaks."""

import os
import threading

import pytest

from scripts.soak_pipeline import BOUND_MS, Holdings, growth_mb, holdings, soak, with_faults

MINUTES = float(os.environ.get("TANDEM_SOAK_MINUTES", "30"))


def report_line(line: str) -> None:
    print(line)


def test_faults_of_camera_and_broker_leak_nothing() -> None:
    verdict = with_faults(300, seed=5, report=report_line)
    assert verdict.frames == 300
    assert verdict.problems == ()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_frames_with_faults_leak_nothing() -> None:
    verdict = with_faults(10_000, seed=11, report=report_line)
    assert verdict.frames == 10_000
    assert len(verdict.faults) == 4
    assert verdict.problems == ()


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 300)
def test_a_long_run_neither_grows_nor_gets_late() -> None:
    verdict = soak(MINUTES, report_line)
    assert verdict.problems == ()
    assert verdict.fps > 25.0
    assert verdict.received > 0.95 * verdict.frames
    assert verdict.oldest_ms < 2 * BOUND_MS


def test_growth_is_that_of_the_settled_run() -> None:
    flat = [(float(second), 100.0 + (50.0 if second < 5 else 60.0)) for second in range(60)]
    assert growth_mb(flat, settle_s=10.0) == 0.0
    rising = [(float(second), 100.0 + second) for second in range(80)]
    assert growth_mb(rising, settle_s=0.0) == pytest.approx(40.0)
    assert growth_mb([], settle_s=0.0) == 0.0


def test_a_thread_and_a_handle_more_are_seen() -> None:
    before, done = holdings(), threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    reading, writing = os.pipe()
    after = holdings()
    done.set()
    thread.join()
    os.close(reading)
    os.close(writing)
    assert isinstance(before, Holdings)
    assert (after.threads - before.threads, after.handles - before.handles) == (1, 2)
