"""The step `kernels`: a reference engine on the GPU, every tactic of it beside the known outputs.

The first session times all tactics. The others choose by times in another order, so that each
tactic of each operation runs once where `_MAX_ROUNDS` suffices; the row says how many did.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from device.engine.cuda_manifest import Cuda
from device.engine.file import Engine, open_engine
from device.runtime.cuda.facts import GpuFacts, read_gpu
from device.runtime.session import Session
from device.runtime.timing_cache import add_timings, read_timings
from device.selftest.engines import Array, golden, open_on_board, unpack_engine
from device.selftest.kit import Kit
from device.selftest.report import TIMINGS, KernelRow, Output

_MAX_ROUNDS = 16
_LARGEST = 1e30  # stands for what is no number


def run(kit: Kit, kit_folder: Path, folder: Path, item: str) -> KernelRow:
    """Run one reference engine. Raises SessionError: it cannot run on this GPU."""
    reference = next(row for row in kit.references if row.name == item)
    path = unpack_engine(kit_folder, folder, item)
    feeds, known = golden(kit_folder, folder, item)
    with open_engine(path) as engine:
        cuda = [i for s in engine.manifest.segments for i in s.implementations
                if isinstance(i, Cuda)]  # fmt: skip
        tactics = sum(len(op.tactics) for implementation in cuda for op in implementation.works)
        with open_on_board(engine, folder) as session:
            outputs = session.infer(feeds)
            again = session.infer(feeds)
            tried = _tactics(session)
        repeatable = all(_bits(outputs[name]) == _bits(again[name]) for name in outputs)
        worst = {name: _compared(name, outputs[name], known[name], reference.limit)
                 for name in outputs}  # fmt: skip
        rounds = 1
        for number in range(1, _MAX_ROUNDS):
            if len(tried) == tactics:
                break
            rounds += 1
            results, chosen = _shuffled(engine, folder, feeds, number)
            tried |= chosen
            for name, array in results.items():
                row = _compared(name, array, known[name], reference.limit)
                worst[name] = max(worst[name], row, key=lambda output: output.relative)
    wrong = next((row for row in worst.values() if row.relative > row.limit), None)
    return KernelRow(
        item=item,
        precision=reference.precision,
        kernels=sum(len(implementation.kernels) for implementation in cuda),
        tactics=tactics,
        tried=len(tried),
        rounds=rounds,
        repeatable=repeatable,
        outputs=tuple(worst.values()),
        problem="" if wrong is None
        else f"output {wrong.name} is off by {wrong.relative:.3g} of its norm, the limit is "
        f"{wrong.limit:.3g}",
    )  # fmt: skip


def _shuffled(
    engine: Engine, folder: Path, feeds: Mapping[str, Array], number: int
) -> tuple[dict[str, Array], set[tuple[int, int, int]]]:
    """Run with the tactics that times in another order choose; return outputs and tactics."""
    gpu = read_gpu()
    times_us = read_timings(folder / TIMINGS).times_us(gpu)
    path = folder / f"order-{number}.json"
    _write_order(path, gpu, times_us, number)
    try:
        with Session(engine, timing_cache=path) as session:
            return session.infer(feeds), _tactics(session)
    finally:
        path.unlink()


def _write_order(path: Path, gpu: GpuFacts, times_us: Mapping[str, float], number: int) -> None:
    """Write a timing cache in which another tactic of each operation is the fastest."""
    keys = sorted(times_us)
    order = np.random.default_rng(number).permutation(len(keys)) + 1
    add_timings(path, gpu, dict(zip(keys, map(float, order), strict=True)))


def _tactics(session: Session) -> set[tuple[int, int, int]]:
    """The tactics that ran: segment, operation, number."""
    return {
        (segment, op, tactic)
        for segment, executor in enumerate(session.executors)
        for op, tactic in enumerate(executor.tactics)
    }


def _compared(name: str, array: Array, known: Array, limit: float) -> Output:
    """Return an output beside the known one."""
    difference = np.abs(array.astype(np.float64) - known.astype(np.float64))
    norm = float(np.linalg.norm(known.astype(np.float64))) or 1.0
    return Output(
        name=name,
        elements=array.size,
        differing=int(np.count_nonzero(~(array == known))),
        largest=_number(float(difference.max(initial=0.0))),
        relative=_number(float(np.linalg.norm(difference)) / norm),
        limit=limit,
        sha256=hashlib.sha256(_bits(array)).hexdigest(),
    )


def _number(value: float) -> float:
    return value if value < _LARGEST else _LARGEST  # False for what is no number


def _bits(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()
