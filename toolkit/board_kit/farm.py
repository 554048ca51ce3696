"""A model measured on a farm: its kit as works of boards, and their reports as times.

Tactics in parts, and each network on each processor. What comes back is checked by
`toolkit.fleet.farm`, and becomes a timing cache and the times of nodes.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import structs

from device.engine.cuda_manifest import Cuda
from device.engine.file import Engine, open_engine
from device.engine.manifest import Precision, Segment
from device.runtime.cuda.facts import GpuFacts
from device.runtime.cuda.tactics import kernels_of, part_of
from device.runtime.timing_cache import TimingCache, read_timings
from device.selftest.kit import Kit, NetworkCase, TacticCase, unpack
from device.selftest.report import (
    TIMINGS,
    LayerRow,
    NetworkRow,
    ReportError,
    ReportFile,
    SegmentRow,
    read_report,
)
from device.selftest.steps import STEPS, network_row
from toolkit.board_kit.measured import times_of
from toolkit.fleet.farm.run import Work
from toolkit.fleet.farm.values import Table, Task, Times
from toolkit.partition.costs.measured import Measured

PORTABLE, DLA, SEGMENT = "portable", "tensorrt", "segment"
SHARED_STEPS = ("kernels", "dla", "rules", "networks")  # those whose items boards may share
ITEMS_A_JOB = 50


@dataclass(slots=True)
class FarmKit:
    """The works of a kit. `networks`: what it has of each network, without times. `gpus`: what a
    board has said of its GPU, which counts as often as its times do."""

    kit: Kit
    works: tuple[Work, ...] = ()
    gpus: dict[str, GpuFacts] = field(default_factory=dict)
    networks: dict[str, NetworkRow] = field(default_factory=dict)

    def timings(self, table: Table) -> TimingCache:
        """Return the times of tactics, as of the GPU that most of them are of."""
        keys = {key for work in self.works if work.steps == ("tactics",) for key in work.task.keys}
        rows = {key: row for key, row in table.rows.items() if key in keys}
        if not rows:
            return TimingCache()
        gpus = Counter(self.gpus[board] for row in rows.values() for board in row.boards)
        times = {key: row.time_us for key, row in rows.items()}
        return TimingCache().with_times(gpus.most_common(1)[0][0], times)

    def measured(self, table: Table, precision: Precision, power_mode: str | None) -> Measured:
        """Return the times of nodes, as a plan takes them."""
        rows = [_with_times(row, table.times) for row in self.networks.values()]
        return Measured(
            profile=self.kit.profile, precision=precision, power_mode=power_mode,
            source=f"{len(table.boards)} boards of the farm ({', '.join(table.boards[:5])})",
            times=times_of(rows),
        )  # fmt: skip


def farm_kit(kit: Kit, folder: Path) -> FarmKit:
    """Return the works of a kit in a folder. Raises TandemError: it cannot be read."""
    result = FarmKit(kit)
    with tempfile.TemporaryDirectory() as name:

        def work_of(case: NetworkCase | TacticCase) -> Work:
            engine_name = case.engine if isinstance(case, TacticCase) else case.name
            file = f"engines/{engine_name}.engine"
            unpack(folder, (file,), Path(name))
            with open_engine(Path(name) / file) as engine:
                if isinstance(case, TacticCase):
                    return _tactic_work(result, case, engine)
                return _network_work(result, case, engine)

        cases: list[NetworkCase | TacticCase] = [*kit.tactics, *kit.networks]
        result.works = tuple(map(work_of, cases))
    return result


def kit_works(kit: Kit) -> tuple[list[Work], dict[tuple[str, str], bytes]]:
    """Return a job for each step of a kit, and where their reports are found by the job's name and
    the board's."""
    works, reports = list[Work](), dict[tuple[str, str], bytes]()
    for step in STEPS:
        items = step.items(kit) if step.name in SHARED_STEPS else ()
        for start in range(0, len(items), ITEMS_A_JOB):
            name = f"{step.name}-{start}" if start else step.name

            def read(board: str, data: bytes, name: str = name) -> Times:
                _read(data, kit)
                reports[name, board] = data
                return {name: 1.0}  # it was done: figures of a report are for its readers

            job_items = items[start : start + ITEMS_A_JOB]
            works.append(
                Work(Task(name, frozenset({name})), ("machine", step.name), job_items, read)
            )
    return works, reports


def _tactic_work(farm: FarmKit, case: TacticCase, engine: Engine) -> Work:
    point = [dim.opt for dim in engine.manifest.dims]
    keys = frozenset[str]().union(
        *(part_of(engine, cuda, point, case.part, case.parts) for cuda in kernels_of(engine))
    )

    def read(board: str, data: bytes) -> Times:
        file = _read(data, farm.kit)
        row = next((row for row in file.report.tactics if row.item == case.name), None)
        if row is None or row.problem:
            raise ReportError(f"{case.name}: {row.problem if row else 'the report has no times'}")
        with tempfile.TemporaryDirectory() as name:
            path = Path(name, TIMINGS)
            path.write_bytes(file.files.get(TIMINGS, b""))
            devices = read_timings(path).devices
        if len(devices) != 1:
            raise ReportError(f"{case.name}: the report has times of {len(devices)} GPUs")
        farm.gpus[board] = devices[0].gpu
        return {key: devices[0].median_us[key] for key in row.keys if key in devices[0].median_us}

    return Work(Task(case.name, keys), ("tactics",), (case.name,), read)


def _network_work(farm: FarmKit, case: NetworkCase, engine: Engine) -> Work:
    planned = {segment.name: _planned(segment) for segment in engine.manifest.segments}
    layers = [
        op.nodes
        for segment in engine.manifest.segments
        if segment.processor == "gpu"
        for i in segment.implementations
        if isinstance(i, Cuda)
        for op in i.works
        if op.nodes
    ]
    keys = frozenset(
        (case.name, *(_key(case.name, (SEGMENT, one)) for one in planned),
         *(_key(case.name, nodes) for nodes in layers))
    )  # fmt: skip

    farm.networks[case.name] = structs.replace(
        network_row(farm.kit, case.name),
        segments=tuple(
            SegmentRow(
                name=one.name, processor=one.processor, implementation=min(planned[one.name]),
                reason="", nodes=one.nodes, time_us=0.0,
            )
            for one in engine.manifest.segments
        ),
        layers=tuple(LayerRow(nodes=nodes, time_us=0.0) for nodes in layers),
    )  # fmt: skip

    def read(_board: str, data: bytes) -> Times:
        report = _read(data, farm.kit).report
        row = next((row for row in report.networks if row.item == case.name), None)
        if row is None or row.problem:
            raise ReportError(f"{case.name}: {row.problem if row else 'the report has no times'}")
        for segment in row.segments:
            allowed = planned.get(segment.name, set())
            if segment.implementation not in allowed:
                raise ReportError(
                    f"{case.name}: segment {segment.name} ran as {segment.implementation}, not as "
                    f"{' or '.join(sorted(allowed)) or 'one of its engine'}: {segment.reason}"
                )
        return dict(_row_times(row))

    return Work(Task(case.name, keys), ("networks",), (case.name,), read)


def _planned(segment: Segment) -> set[str]:
    """Return the implementations as which a segment may run: on a DLA its time is TensorRT's."""
    tags = {str(type(i).__struct_config__.tag) for i in segment.implementations}
    return tags & {DLA} or tags - {PORTABLE} or {PORTABLE}


def _row_times(row: NetworkRow) -> Iterator[tuple[str, float]]:
    yield row.item, row.median_ms * 1e3
    yield from (
        (_key(row.item, (SEGMENT, segment.name)), segment.time_us) for segment in row.segments
    )
    yield from ((_key(row.item, layer.nodes), layer.time_us) for layer in reversed(row.layers))


def _with_times(row: NetworkRow, times: Mapping[str, float]) -> NetworkRow:
    """Return a network with its times, without what has none."""
    timed = [
        (segment, times.get(_key(row.item, (SEGMENT, segment.name)))) for segment in row.segments
    ]
    layers = [(layer, times.get(_key(row.item, layer.nodes))) for layer in row.layers]
    return structs.replace(
        row,
        segments=tuple(structs.replace(one, time_us=us) for one, us in timed if us is not None),
        layers=tuple(structs.replace(one, time_us=us) for one, us in layers if us is not None),
    )


def _key(item: str, names: Sequence[str]) -> str:
    return "\n".join((item, *names))


def _read(data: bytes, kit: Kit) -> ReportFile:
    """Read a report of the kit. Raises ReportError."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "report")
        path.write_bytes(data)
        file = read_report(path)
    if (file.report.kit, file.report.profile) != (kit.sha256, kit.profile):
        raise ReportError(f"the report is of another kit, for {file.report.profile}")
    return file
