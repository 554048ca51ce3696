"""The step `tactics`: the times of a part of an engine's tactics, each on this GPU by itself."""

from contextlib import closing
from pathlib import Path

from device.engine.file import open_engine
from device.errors import SessionError
from device.runtime.cuda.driver import CudaError
from device.runtime.cuda.segment import LoadedSegment
from device.runtime.cuda.tactics import kernels_of, part_of
from device.runtime.executors.cuda import time_tactics
from device.runtime.timing_cache import add_timings
from device.selftest.engines import unpack_engine
from device.selftest.kit import Kit
from device.selftest.report import TIMINGS, TacticRow


def run(kit: Kit, kit_folder: Path, folder: Path, item: str) -> TacticRow:
    """Time the tactics of one part. Raises SessionError: they cannot run on this GPU."""
    case = next(row for row in kit.tactics if row.name == item)
    times_us: dict[str, float] = {}
    with open_engine(unpack_engine(kit_folder, folder, case.engine)) as engine:
        point = tuple(dim.opt for dim in engine.manifest.dims)
        for cuda in kernels_of(engine):
            try:
                with closing(LoadedSegment(engine, cuda)) as gpu:
                    part_keys = part_of(engine, cuda, point, case.part, case.parts)
                    time_tactics(gpu, point, times_us, part_keys)
                    add_timings(folder / TIMINGS, gpu.facts, times_us)
            except CudaError as error:
                raise SessionError(f"{item} cannot be timed: {error}") from error
    return TacticRow(item=item, keys=tuple(sorted(times_us)))
