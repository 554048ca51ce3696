"""Plans and builds come through one frontend: they place and quantize every node alike."""

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from legalize_graphs import floats
from model_fixtures import save
from onnx import helper
from random_networks import Small

from calibration.table import CalibrationTable, read_table, write_table
from calibration.trt_cache import cache_of, write_cache
from device.engine.manifest import Precision
from toolkit.dla.legalize.rewrite import Applied
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.engine.frontend import run_frontend
from toolkit.engine.measure import CalibrateRequest, measure_model
from toolkit.engine.plan_models import PlanMember, PlanRequest, make_plan
from toolkit.engine.target import choose_target
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import ImportedModel, import_model
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.plan import Plan, PlanOptions
from toolkit.progress import silent
from toolkit.quantize.qdq.export import export_qdq
from toolkit.quantize.quantize import calibrated_tensors, with_operands
from toolkit.quantize.ranges.measure import RangeOptions
from toolkit.quantize.ranges.table_file import imported_table, read_ranges

BOARDS = (  # of one kind of ranges
    "agx-orin-64gb",
    "orin-nx-8gb",
    "agx-xavier-32gb",
    "orin-nano-8gb",
    "agx-orin-64gb",
)
RANGES = ("table", "cache", "Q/DQ", "none")


class Mixed(Small):
    """Networks with nodes that passes fold and rewrites change."""

    SIDES = (28, 56)
    WIDTHS = (64, 128)
    NODES = (12, 20)

    def pick(self) -> tuple[str, int, int]:
        """Read the latest tensor, so that no node is without a reader."""
        return self.open_[-1]

    def pointwise(self) -> None:
        name, channels, side = self.pick()
        at = len(self.nodes)
        operands = [f"{part}{at}" for part in ("gamma", "beta", "mean", "var")]
        rows = np.abs(floats(self.rng, 4, channels)) + 0.5
        self.weights |= dict(zip(operands, rows, strict=True))
        self.add_node("BatchNormalization", f"{name} {' '.join(operands)}", channels, side)

    def refused(self) -> None:
        """Add a HardSwish, which the DLA takes rewritten, or what no rewrite helps."""
        if self.rng.random() < 0.3:
            super().refused()
            return
        name, channels, side = self.pick()
        self.add_node("HardSwish", name, channels, side)


def _table(imported: ImportedModel, graph: ir.Model, rng: np.random.Generator) -> CalibrationTable:
    """Return ranges of every tensor, and keep one node in floating point."""
    tensors = calibrated_tensors(graph)
    amax = dict(zip(tensors, rng.uniform(0.5, 8.0, len(tensors)).tolist(), strict=True))
    float_node = str(rng.choice([str(node.name) for node in graph.graph]))
    return CalibrationTable(
        method="minmax",
        samples=1,
        data_sha256="0" * 64,
        model_sha256=imported.sha256,
        tensors=with_operands(graph, amax),
        keep_float=(float_node,),
    )


def _case(seed: int, kind: str, folder: Path) -> tuple[Path, Path | None]:
    """Write a random network, and the file of its ranges."""
    rng = np.random.default_rng(seed)
    model, ranges = folder / f"net{seed}.onnx", folder / f"ranges{seed}"
    onnx.save(Mixed(rng).net().proto(), model)
    imported = import_model(model)
    graph, _ = run_passes(imported.model)
    table = _table(imported, graph, rng)
    if kind == "table":
        write_table(ranges, table)
    elif kind == "cache":  # of the tensors of the file, and not of all
        names = calibrated_tensors(imported.model)
        known = {name: 2.0 for name in names if rng.random() < 0.75} or {names[0]: 2.0}
        write_cache(ranges, cache_of(known, "100300"))
    elif kind == "Q/DQ":
        ir.save(export_qdq(graph, table.tensors, keep_float=frozenset(table.keep_float)), model)
    return model, ranges if kind in ("table", "cache") else None


@dataclass(frozen=True)
class Decisions:
    """What a plan or a build has decided, and how."""

    precision: Precision
    nodes: Sequence[tuple[str, str, str]]
    rewrites: Sequence[Applied]
    floating: Set[str]


def _decisions(seed: int, folder: Path) -> tuple[Decisions, Decisions]:
    """Return what a plan of a random network decides, and what a build of it does."""
    kind, board = RANGES[seed // 5], BOARDS[seed % 5]
    precision: Precision = "fp16" if seed in (1, 7, 11) else "int8"
    model, ranges = _case(seed, kind, folder)
    forced = Forced() if seed % 2 == 0 or board == "orin-nano-8gb" else Forced(dla=("all",))
    options = PlanOptions(precision, min_gain=0.0, forced=forced)
    member = PlanMember("net", model, table=ranges)
    planned = make_plan(PlanRequest((member,), board, options=options))
    (plan,), (front,) = planned.shared.plans, planned.fronts
    build_options = BuildOptions(
        precision=precision,
        table=None if ranges is None else read_ranges(ranges).table,
        dummy_ranges=kind == "none",
        plan=options,
        kernels=False,
    )
    built = build_engine(model, board, folder / "net.engine", build_options)
    return (
        Decisions(plan.precision, _places(plan), front.prepared.applied, front.keep_float),
        Decisions(built.plan.precision, _places(built.plan), built.rewrites, built.kept.keys()),
    )


def _places(plan: Plan) -> list[tuple[str, str, str]]:
    return [(row.node, row.processor, row.rule) for row in plan.placements]


def test_plans_place_and_quantize_every_node_as_builds_do(tmp_path: Path) -> None:
    pairs = [_decisions(seed, tmp_path) for seed in range(20)]
    for plan, build in pairs:
        assert plan == build
    plans = [plan for plan, _ in pairs]
    places = Counter(place for plan in plans for _, place, _ in plan.nodes)
    assert min(places["gpu"], places["dla0"]) > 20
    assert sum(bool(plan.rewrites) for plan in plans) >= 3
    assert sum(bool(plan.floating) for plan in plans) >= 3


def boxes_and_scores(folder: Path, rng: np.random.Generator) -> Path:
    """A head that joins boxes of pixels with scores."""
    nodes = [
        helper.make_node("Mul", ["x", "size"], ["boxes"], "scaled"),
        helper.make_node("Conv", ["x", "w"], ["logits"], "conv"),
        helper.make_node("Sigmoid", ["logits"], ["scores"], "sigmoid"),
        helper.make_node("Concat", ["boxes", "scores"], ["y"], "concat", axis=1),
    ]
    weights = {"size": np.full(1, 100, np.float32), "w": floats(rng, 2, 4, 1, 1)}
    return save(folder / "m.onnx", nodes, {"x": [1, 4, 8, 8]}, {"y": [1, 6, 8, 8]}, weights)


def test_a_calibration_for_a_board_gives_the_table_that_its_build_saves(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = boxes_and_scores(tmp_path, rng)
    samples = [floats(rng, 1, 4, 8, 8) for _ in range(8)]
    board, options = "agx-orin-64gb", RangeOptions("minmax")
    ranges, _ = measure_model(
        CalibrateRequest(model, samples, board, options=options, accept_loss=True), silent
    )
    build_options = BuildOptions(
        data=samples,
        ranges=options,
        save_table=tmp_path / "table.json",
        accept_loss=True,
        kernels=False,
    )
    build_engine(model, board, tmp_path / "m.engine", build_options)
    assert ranges.table.keep_float == ("concat",)
    assert ranges.table == read_table(tmp_path / "table.json")


def test_dummy_ranges_keep_the_nodes_in_floating_point_that_a_plan_keeps(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model, board = boxes_and_scores(tmp_path, rng), "agx-orin-64gb"
    options = BuildOptions(precision="int8", dummy_ranges=True, kernels=False)
    built = build_engine(model, board, tmp_path / "m.engine", options)
    request = PlanRequest((PlanMember("net", model),), board, options=PlanOptions("int8"))
    planned = make_plan(request)
    assert built.kept.keys() == planned.fronts[0].keep_float == {"concat"}
    assert _places(built.plan) == _places(planned.shared.plans[0])


def test_a_range_that_clips_is_no_largest_magnitude(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Pow", ["x", "two"], ["e"]),
        helper.make_node("ReduceMean", ["e", "last"], ["y"]),
    ]
    constants = {"two": np.float32(2), "last": np.array([-1])}
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 8]}, {"y": [1, 1]}, constants)
    foreign = imported_table({"x": 50.0, "e": 1.0, "y": 1.0}, "0" * 64)
    options = BuildOptions("fp16", table=foreign)
    assert "e" in run_frontend(path, choose_target("h200"), options).wide
