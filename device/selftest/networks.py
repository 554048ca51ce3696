"""The step `networks`: one network on one placement, finished, timed, with the power it takes."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from msgspec import structs

from device.engine.file import open_engine
from device.runtime.session import Session
from device.selftest.engines import (
    Array,
    finish,
    open_on_board,
    random_feeds,
    segment_rows,
    unpack_engine,
)
from device.selftest.kit import Kit
from device.selftest.report import LayerRow, NetworkRow
from device.selftest.sensors import PowerSampler
from device.selftest.steps import network_row

_FINISH_S = 120.0
_WARM_UP_RUNS = 10
_MAX_WARM_UP_S = 1.0
_MAX_RUNS = 500
_MAX_S = 3.0  # of timed runs
_SEGMENT_RUNS = 20
_MAX_SEGMENTS_S = 2.0


def run(kit: Kit, kit_folder: Path, folder: Path, item: str) -> NetworkRow:
    """Time one network. Raises SessionError: it cannot run here."""
    path = unpack_engine(kit_folder, folder, item)
    try:
        with open_engine(path) as engine:
            finished = finish(engine, folder, _FINISH_S)
            begin = time.monotonic()
            with open_on_board(engine, folder) as session:
                load_s = time.monotonic() - begin
                feeds = random_feeds(session.inputs)
                with PowerSampler() as power:
                    times_ms = _times_ms(lambda: session.infer(feeds))
                return structs.replace(
                    network_row(kit, item),
                    runs=len(times_ms),
                    median_ms=float(np.median(times_ms)),
                    p10_ms=float(np.percentile(times_ms, 10)),
                    p90_ms=float(np.percentile(times_ms, 90)),
                    load_s=load_s,
                    watts=power.mean_watts,
                    segments=segment_rows(engine, session, _segments_us(session, feeds), finished),
                    layers=_layers(session),
                )
    finally:
        path.unlink()  # tens of MB each, unpacked


def _times_ms(infer: Callable[[], object]) -> list[float]:
    """Run without a pause and return the time of each run, after runs to warm up."""
    for _ in _repeated(_WARM_UP_RUNS, _MAX_WARM_UP_S):
        infer()
    times_ms: list[float] = []
    for _ in _repeated(_MAX_RUNS, _MAX_S):
        begin = time.perf_counter()
        infer()
        times_ms.append((time.perf_counter() - begin) * 1e3)
    return times_ms


def _repeated(runs: int, seconds: float) -> Iterator[int]:
    """Count to `runs`, but stop after `seconds`: a CPU in the DLA's place is slow."""
    end = time.perf_counter() + seconds
    for number in range(runs):
        if number and time.perf_counter() >= end:
            return
        yield number


def _segments_us(session: Session, feeds: dict[str, Array]) -> dict[str, float]:
    """Return the median time of each segment, with its copies, by the host's clock."""
    runs = [session.segment_times_ms(feeds) for _ in _repeated(_SEGMENT_RUNS, _MAX_SEGMENTS_S)]
    return {name: float(np.median([run[name] for run in runs])) * 1e3 for name in runs[0]}


def _layers(session: Session) -> tuple[LayerRow, ...]:
    """Return the times of operations that compute nodes, of all segments that can tell them."""
    rows = []
    for executor in session.executors:
        if executor.profiler is not None:
            for layer in executor.profiler.layer_times(_SEGMENT_RUNS):
                if layer.nodes:
                    rows.append(LayerRow(nodes=layer.nodes, time_us=layer.time_us))
    return tuple(rows)
