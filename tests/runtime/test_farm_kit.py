"""A kit for a farm: tactics in parts on a GPU, and reports as the times that a build takes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_double
import msgspec
import numpy as np
import pytest
from model_fixtures import small_convnet
from msgspec import structs

from device.agent.operations import JobArguments
from device.engine.file import open_engine
from device.errors import TandemError
from device.runtime.cuda.facts import read_gpu
from device.runtime.cuda.tactics import choices_of, kernels_of
from device.runtime.executors import cuda
from device.selftest import tactics
from device.selftest.engines import unpack_engine
from device.selftest.kit import KitError, open_packed, pack
from device.selftest.report import (
    TIMINGS,
    LayerRow,
    NetworkRow,
    Report,
    ReportError,
    SegmentRow,
    TacticRow,
    write_report,
)
from toolkit.board_kit.farm import FarmKit, farm_kit
from toolkit.board_kit.make import KitRequest, make_kit
from toolkit.board_kit.own_model import own_model
from toolkit.cli.actions.measure_on import notes_of
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.fleet.farm.values import Row, Table, Times
from toolkit.gpu.schedule.tactics import TacticOptions
from toolkit.importers.source import ModelPath
from toolkit.partition.costs.measured import MeasuredTime

PROFILE = "orin-nx-16gb"


def run_once(stream: Any, work: Callable[[], None]) -> float:
    """The double has no times, and repeating its interpreter takes minutes."""
    work()
    stream.wait()
    return 5.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a kit of a small network, and beside it the model."""
    folder = tmp_path_factory.mktemp("farm")
    path = small_convnet(folder / "m.onnx", np.random.default_rng(5), size=16)
    request = KitRequest(
        PROFILE, networks=[own_model(path)], precisions=("fp16",), demo=False, choices_a_part=1
    )
    with cuda_double.interpreted_cubins():
        make_kit(folder / "kit", request, lambda _: None)
    return folder


@pytest.fixture(scope="module")
def farm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> FarmKit:
    target = tmp_path_factory.mktemp("board")
    pack(folder / "kit", folder / "kit.zip")
    return farm_kit(open_packed(folder / "kit.zip", target), target)


def test_parts_of_tactics_are_timed_on_a_gpu_and_make_up_all(
    folder: Path, farm: FarmKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "repeated_us", run_once)
    kit, timed = farm.kit, dict[str, float]()
    works = [work for work in farm.works if work.steps == ("tactics",)]
    assert len(works) == len(kit.tactics) > 1
    with cuda_double.installed():
        for work in works:
            place = tmp_path / work.task.name
            place.mkdir()
            row = tactics.run(kit, folder / "kit", place, work.task.name)
            report = Report(
                tandem="1", kit=kit.sha256, profile=PROFILE, seconds=1.0, steps=(), tactics=(row,)
            )
            path = place / "report"
            write_report(path, report, {TIMINGS: (place / TIMINGS).read_bytes()})
            times = work.read("b0", path.read_bytes())
            assert times.keys() == work.task.keys
            assert all(us > 0.0 for us in times.values())
            timed |= times
    with open_engine(unpack_engine(folder / "kit", tmp_path, "m-fp16-gpu")) as engine:
        known = {
            key for one in kernels_of(engine) for row in choices_of(engine, one) for key in row
        }
    assert timed.keys() == known
    assert list(farm.gpus) == ["b0"]


def test_a_report_of_another_kit_or_without_times_is_refused(farm: FarmKit, tmp_path: Path) -> None:
    work = farm.works[0]
    path = tmp_path / "report"
    for report, reason in (
        (Report(tandem="1", kit="other", profile=PROFILE, seconds=1.0, steps=()), "another kit"),
        (Report(tandem="1", kit=farm.kit.sha256, profile=PROFILE, seconds=1.0, steps=()),
         "has no times"),
        (Report(tandem="1", kit=farm.kit.sha256, profile=PROFILE, seconds=1.0, steps=(),
                tactics=(TacticRow(item=work.task.name, problem="it crashed"),)), "it crashed"),
    ):  # fmt: skip
        write_report(path, report, {})
        with pytest.raises(ReportError, match=reason):
            work.read("b0", path.read_bytes())
    with pytest.raises(TandemError):
        work.read("b0", b"no report")


def test_a_network_that_ran_elsewhere_than_planned_is_refused(
    farm: FarmKit, tmp_path: Path
) -> None:
    work = next(work for work in farm.works if work.task.name == "m-fp16-gpu")
    names = [key.split("\n")[-1] for key in work.task.keys if "\nsegment\n" in key]
    rows = tuple(
        SegmentRow(name=name, processor="gpu", implementation="portable", reason="no driver",
                   nodes=(), time_us=1.0)
        for name in names
    )  # fmt: skip
    row = NetworkRow(item=work.task.name, median_ms=1.0, segments=rows)
    report = Report(
        tandem="1", kit=farm.kit.sha256, profile=PROFILE, seconds=1.0, steps=(), networks=(row,)
    )
    write_report(tmp_path / "report", report, {})
    with pytest.raises(ReportError, match="ran as portable, not as cuda: no driver"):
        work.read("b0", (tmp_path / "report").read_bytes())


def test_a_build_takes_the_times_of_a_farm(folder: Path, farm: FarmKit, tmp_path: Path) -> None:
    with open_engine(unpack_engine(folder / "kit", tmp_path, "m-fp16-gpu")) as engine:
        kernels, segments = list(kernels_of(engine)), engine.manifest.segments
        choices = [row for one in kernels for row in choices_of(engine, one)]
        layers = [op.nodes for one in kernels for op in one.works if op.nodes]
    row = NetworkRow(
        item="m-fp16-gpu", precision="fp16", median_ms=0.2,
        segments=tuple(
            SegmentRow(name=one.name, processor="gpu", implementation="cuda", reason="",
                       nodes=one.nodes, time_us=200.0)
            for one in segments
        ),
        layers=tuple(LayerRow(nodes=nodes, time_us=40.0) for nodes in layers),
    )  # fmt: skip
    work = next(work for work in farm.works if work.task.name == "m-fp16-gpu")

    def read(row: NetworkRow) -> Times:
        report = Report(
            tandem="1", kit=farm.kit.sha256, profile=PROFILE, seconds=1.0, steps=(), networks=(row,)
        )
        write_report(tmp_path / "report", report, {})
        return work.read("b0", (tmp_path / "report").read_bytes())

    assert read(row).keys() == work.task.keys
    # What is not a time is the kit's, whatever a board says that is read last.
    forged = tuple(structs.replace(one, nodes=("forged",)) for one in row.segments)
    extra = LayerRow(nodes=("extra",), time_us=1.0)
    read(structs.replace(row, variant="dla", segments=forged, layers=(*row.layers, extra)))
    with pytest.raises(ReportError, match="segment none ran as cuda, not as one of its engine"):
        read(structs.replace(row, segments=(structs.replace(forged[0], name="none"),)))
    with cuda_double.installed():
        gpu = read_gpu()
    farm.gpus |= dict.fromkeys(("b0", "b1", "b2"), gpu)
    # Whom nobody believes says another GPU, and as often as it likes.
    farm.gpus |= dict.fromkeys(("x0", "x1", "x2", "x3"), structs.replace(gpu, name="false"))
    times = dict.fromkeys(work.task.keys, 50.0)  # the last tactic by estimate is the fastest
    times |= {key: 10.0 - n for keys in choices for n, key in enumerate(keys)}
    rows = {key: Row(us, us, us, ("b0", "b1", "b2")) for key, us in times.items()}
    table = Table(rows, 0.05, {}, {}, {}, {})
    measured = farm.measured(table, "fp16", None)
    assert {one.time_us for one in measured.times} == {50.0}
    assert {one.nodes for one in measured.times} == set(layers)
    assert {one.gpu for one in farm.timings(table).devices} == {gpu}
    # A time that no boards agree on is left out.
    fewer = {key: one for key, one in rows.items() if key != "\n".join((row.item, *layers[0]))}
    partly = Table(fewer, 0.05, {"m": "partly"}, {}, {}, {"m": "of 5 times 1 are left out"})
    assert {one.nodes for one in farm.measured(partly, "fp16", None).times} == set(layers[1:])
    assert "m was partly measured: of 5 times 1 are left out" in notes_of(farm, partly)
    replaced = MeasuredTime(nodes=("replaced by a rewrite",), processor="gpu", time_us=1.0)
    measured = structs.replace(measured, times=(*measured.times, replaced))
    notes = tuple(notes_of(farm, table))
    options = BuildOptions(
        precision="fp16", tactics=TacticOptions(timings=farm.timings(table)),
        node_times=(measured,),
        notes=notes,
    )  # fmt: skip
    with cuda_double.interpreted_cubins():
        built = build_engine(ModelPath(folder / "m.onnx"), PROFILE, tmp_path / "m.engine", options)
    assert built.notes[: len(notes)] == notes
    assert "were measured on b0, b1, b2 of the farm, each by 3 of them" in built.report
    assert any("tactics by times of" in note for note in built.notes)
    assert dict(built.plan.busy_us) == {"gpu": pytest.approx(50.0 * len(layers))}


def test_a_job_may_ask_only_for_items_of_its_kit(farm: FarmKit) -> None:
    chosen = farm.kit.only(["m-fp16-gpu.0"])
    assert [case.name for case in chosen.tactics] == ["m-fp16-gpu.0"]
    assert not chosen.networks
    with pytest.raises(KitError, match="the kit has no item 'passwords'"):
        farm.kit.only(["m-fp16-gpu.0", "passwords"])


@pytest.mark.parametrize(
    "name", ["my net", "net(1)", "a,b", "-x", "n" * 200, "\u00fc", "net-v1.2_b"]
)
def test_an_item_of_a_job_may_have_the_name_of_any_model(
    folder: Path, tmp_path: Path, name: str
) -> None:
    path = tmp_path / f"{name}.onnx"
    path.write_bytes((folder / "m.onnx").read_bytes())
    item = own_model(path).name
    assert (item == name) == (name == "net-v1.2_b")
    values = {
        "kit": "a" * 64, "bytes": 10, "chunk_bytes": 4096, "index": "b" * 64, "chunk_format": 1,
        "steps": "networks", "items": f"{item}-fp16-gpu", "minutes": 1.0,
    }  # fmt: skip
    arguments = msgspec.convert(values, JobArguments)
    assert arguments.items.split(",") == [f"{item}-fp16-gpu"]
    assert not arguments.items.startswith("-")
