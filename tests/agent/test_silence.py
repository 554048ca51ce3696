"""When a silent pipeline is ended: decisions at their limits, and what real processes do."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from process_lines import next_line

from device.agent.pipeline_process import (
    BURST_LINES,
    LINES_PER_S,
    PipelineEvent,
    PipelineExited,
    PipelineProcess,
)
from device.agent.process_activity import Activity, activity_of
from device.agent.silence import HARD, IDLE_S, STOPPED_S, ActivityWatch, Heard, Patience, why_ended
from device.start.keeper import keeper_command
from device.start.process_tree import descendants

PATIENCE_S = 60.0
STALL_S, START_S = 2.0, 100.0
LIMITS = Patience(STALL_S, START_S)
FIRST = replace(LIMITS, first=True)
RUNS = Heard(10.0, beating=True, started_s=0.0)
LOADS = Heard(10.0, beating=False, started_s=0.0)
FLOODS = replace(RUNS, flood_s=3.0)
SLEEPS = Activity("S", 5, 100, 0)


def seen(*looks: Activity | None, from_s: float = 10.0) -> ActivityWatch:
    """Looks each half second."""
    value = ActivityWatch()
    for number, activity in enumerate(looks):
        value = value.looked(activity, from_s + number / 2)
    return value


def grown(state: str, **each: int) -> list[Activity]:
    """Twenty-one looks, ten seconds, at a process that does so much between two of them."""
    return [
        Activity(state, *(each.get(key, 0) * n for key in ("cpu_ticks", "io_bytes", "waited_ns")))
        for n in range(21)
    ]  # fmt: skip


IDLES = seen(*[SLEEPS] * 21)
BUSY = seen(*grown("S", cpu_ticks=1))
READS = seen(*grown("S", io_bytes=1))
SPINS = seen(*grown("R"))
STARVES = seen(*grown("R", waited_ns=400_000_000))
ON_DISK = seen(*grown("D"))
STOPPED = seen(*[replace(SLEEPS, state="T")] * 3)


@pytest.mark.parametrize(
    ("heard", "looks", "patience", "now_s", "reason"),
    [
        # it runs: its loop has so long, whatever other threads do
        (RUNS, ActivityWatch(), LIMITS, 12.0, None),
        (RUNS, ActivityWatch(), LIMITS, 12.1, "no sign of life for 2 s (stall_s)"),
        (RUNS, IDLES, LIMITS, 12.1, "no sign of life"),
        (RUNS, BUSY, LIMITS, 12.1, "no sign of life"),
        (RUNS, SPINS, LIMITS, 12.1, "no sign of life"),
        # unless the machine gave it no processor or disk, but not without end
        (RUNS, STARVES, LIMITS, 10.0 + HARD * STALL_S, None),
        (RUNS, STARVES, LIMITS, 10.1 + HARD * STALL_S, "no sign of life"),
        (RUNS, ON_DISK, LIMITS, 10.0 + HARD * STALL_S, None),
        (RUNS, seen(*grown("R", waited_ns=400_000_000)[:3]), LIMITS, 13.0, None),
        (RUNS, seen(*grown("R", waited_ns=400_000_000)[:3]), LIMITS, 13.1, "no sign of life"),
        # its first frame may take longer, if it does something
        (RUNS, BUSY, FIRST, 20.0, None),
        (RUNS, BUSY, FIRST, 20.1, "no sign of life for 10 s"),
        (RUNS, IDLES, FIRST, 10.0 + IDLE_S, None),
        (RUNS, IDLES, FIRST, 10.1 + IDLE_S, "used no processor and no disk"),
        # a signal has stopped it
        (RUNS, STOPPED, LIMITS, 10.0 + STOPPED_S, None),
        (RUNS, STOPPED, LIMITS, 10.1 + STOPPED_S, "a signal has stopped it"),
        (LOADS, STOPPED, LIMITS, 10.1 + STOPPED_S, "a signal has stopped it"),
        # it floods its output, with heartbeats or without
        (replace(FLOODS, alive_s=50.0), ActivityWatch(), LIMITS, 51.0, None),
        (FLOODS, BUSY, LIMITS, 12.1, "but a flood of other output"),
        (replace(LOADS, flood_s=3.0), BUSY, LIMITS, 12.1, "but a flood of other output"),
        (replace(LOADS, flood_s=2.0), BUSY, LIMITS, 12.1, None),
        # it loads: as long as it gets on
        (LOADS, IDLES, LIMITS, 10.0 + IDLE_S, None),
        (LOADS, IDLES, LIMITS, 10.1 + IDLE_S, "no output, and used no processor"),
        (replace(LOADS, alive_s=50.0), IDLES, LIMITS, 50.0 + IDLE_S, None),  # a thread beats
        (LOADS, ActivityWatch(), LIMITS, 99.0, None),  # nothing is known
        *((LOADS, looks, LIMITS, 20.0, None) for looks in (BUSY, READS, SPINS, STARVES, ON_DISK)),
        (LOADS, seen(*[SLEEPS] * 9, *grown("S", cpu_ticks=9)[5:6]), LIMITS, 14.0 + IDLE_S, None),
        (LOADS, seen(*[SLEEPS] * 9, *grown("S", cpu_ticks=9)[5:6]), LIMITS, 17.6, "no output"),
        (replace(LOADS, alive_s=99.9), BUSY, LIMITS, 100.0, None),
        (replace(LOADS, alive_s=99.9), BUSY, LIMITS, 100.1, "no first heartbeat for 100 s (start"),
    ],
)  # fmt: skip
def test_a_silent_pipeline_is_ended_at_its_limit(
    heard: Heard, looks: ActivityWatch, patience: Patience, now_s: float, reason: str | None
) -> None:
    actual = why_ended(heard, looks, patience, now_s, 0.0)
    assert (actual is None) == (reason is None), actual
    assert (reason or "") in (actual or "")


def test_what_was_missed_while_the_agent_stood_still_does_not_count() -> None:
    assert why_ended(RUNS, IDLES, FIRST, 60.0, 58.0) is None
    assert why_ended(RUNS, STOPPED, LIMITS, 60.0, 59.0) is None
    assert why_ended(LOADS, ActivityWatch(), LIMITS, 130.0, 31.0) is None


# --- real processes


@contextmanager
def running(code: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        keeper_command((sys.executable, "-c", code), ""),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        next_line(process)
        yield process
    finally:
        process.kill()
        process.wait()


def activity_after(pid: int, state: str) -> Activity:
    """Return the activity of a process once it is in a state."""
    until_s = time.monotonic() + PATIENCE_S
    while (activity := activity_of(pid)) is None or activity.state != state:
        assert time.monotonic() < until_s, activity
        time.sleep(0.01)
    return activity


def test_one_that_sleeps_does_nothing_and_one_that_a_signal_stops_says_so() -> None:
    with running("import time; print(flush=True); time.sleep(600)") as process:
        before = activity_after(process.pid, "S")
        time.sleep(0.2)
        assert replace(activity_after(process.pid, "S"), waited_ns=0) == replace(
            before, waited_ns=0
        )
        os.kill(descendants(process.pid)[0].pid, signal.SIGSTOP)
        assert activity_after(process.pid, "T").state == "T"


def test_the_work_of_what_it_started_counts_in_whatever_session() -> None:
    spin = "while True: open('/proc/self/stat').read()"
    code = (
        "import subprocess, sys, time;"
        f"child = subprocess.Popen([sys.executable, '-c', {spin!r}], start_new_session=True);"
        "print(flush=True); sys.stdin.read(1); child.kill(); print(flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        keeper_command((sys.executable, "-c", code), ""),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    try:
        next_line(process)
        before = activity_after(process.pid, "S")
        until_s = time.monotonic() + PATIENCE_S
        while (now := activity_of(process.pid)) is None or now.cpu_ticks <= before.cpu_ticks:
            assert time.monotonic() < until_s
        assert now.io_bytes > before.io_bytes
        process.stdin.write("x")
        process.stdin.flush()
        next_line(process)
    finally:
        process.kill()
        process.wait()


def test_of_one_that_has_ended_nothing_is_known() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(PATIENCE_S)
    assert activity_of(process.pid) is None


FLOOD = """
import os
beat = b'{"kind":"heartbeat","frames":1,"errors":0,"state":"running"}\\n'
stats = (b'{"kind":"stats","frames":1,"fps":1,"latency_p50_ms":1,"latency_p99_ms":1,'
         b'"stage_p50_ms":{},"stage_p99_ms":{},"dropped":{}}\\n')
os.write(1, beat)
while True:
    os.write(1, stats)
"""


def test_a_flood_takes_neither_time_nor_memory_and_hides_no_missing_heart(tmp_path: Path) -> None:
    events: queue.Queue[PipelineEvent] = queue.Queue()
    child = PipelineProcess(events.put, 0.2)
    begin_s = time.monotonic()
    child.start((sys.executable, "-c", FLOOD), {})
    try:
        until_s = begin_s + PATIENCE_S
        while child.heard.flood_s < 0.5:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        heard, took_s = child.heard, time.monotonic() - begin_s
        assert events.qsize() <= BURST_LINES + LINES_PER_S * took_s + 1
        assert heard.beating
        assert heard.alive_s < time.monotonic() - 0.5
    finally:
        child.stop()


BEATS = """
import os, time
while True:
    os.write(1, b'{"kind":"heartbeat","frames":1,"errors":0,"state":"running"}\\n')
    time.sleep(0.02)
"""


def test_an_agent_that_is_busy_still_hears_the_heart(tmp_path: Path) -> None:
    free = threading.Event()
    child = PipelineProcess(lambda _event: free.wait(PATIENCE_S) and None, 0.2)
    child.start((sys.executable, "-c", BEATS), {})
    try:
        until_s = time.monotonic() + PATIENCE_S
        while not child.heard.beating:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        first_s = child.heard.alive_s
        while child.heard.alive_s < first_s + 2.0:  # far more than wait for the agent
            assert time.monotonic() < until_s, "the heart is heard no more"
            time.sleep(0.05)
    finally:
        free.set()
        child.stop()


def test_one_that_a_signal_has_stopped_is_ended_without_the_grace_period(tmp_path: Path) -> None:
    code = "import os, time; os.kill(os.getpid(), 19); time.sleep(600)"
    child = PipelineProcess(lambda _event: None, 30.0)
    child.start((sys.executable, "-c", code), {})
    until_s = time.monotonic() + PATIENCE_S
    while (activity := child.activity()) is None or activity.state != "T":
        assert time.monotonic() < until_s
        time.sleep(0.01)
    begin_s = time.monotonic()
    child.stop()
    assert time.monotonic() - begin_s < 15.0


def test_one_that_is_stopped_with_its_keeper_ends_when_it_is_killed(tmp_path: Path) -> None:
    events: queue.Queue[PipelineEvent] = queue.Queue()
    child = PipelineProcess(events.put, 30.0)
    child.start((sys.executable, "-c", "import os, time; os.kill(os.getppid(), 19);"
                 "os.kill(os.getpid(), 19); time.sleep(600)"), {})  # fmt: skip
    until_s = time.monotonic() + PATIENCE_S
    while (activity := child.activity()) is None or activity.state != "T":
        assert time.monotonic() < until_s
        time.sleep(0.01)
    child.kill()
    try:
        assert isinstance(events.get(timeout=PATIENCE_S), PipelineExited)
    finally:
        child.stop()
