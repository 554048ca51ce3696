"""Several models on one board, and times from a board in place of predicted ones."""

from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from onnx import helper
from planning_graphs import constant, graph_of

from device.errors import ConfigError
from device.profile import load_profile
from toolkit.cli.commands.plan import plan as plan_command
from toolkit.errors import PlanError
from toolkit.partition.costs.measured import load_measured
from toolkit.partition.planning.objectives import BUILD_GOALS
from toolkit.partition.planning.plan import Model, Plan, PlanOptions, SharedPlan, plan_together
from toolkit.partition.planning.workload import load_workload

ORIN = load_profile("agx-orin-64gb")


def convs(count: int, channels: int = 64) -> ir.Model:
    """Convolutions n0, n1, ... that the DLA takes."""
    nodes, weights, data = [], {}, "x"
    for index in range(count):
        made = "y" if index == count - 1 else f"t{index}"
        weights[f"w{index}"] = constant(channels, channels, 3, 3)
        reads = [data, f"w{index}"]
        nodes.append(helper.make_node("Conv", reads, [made], name=f"n{index}", pads=[1] * 4))
        data = made
    return graph_of(nodes, {"x": (1, channels, 56, 56)}, ["y"], weights)


def planned(*models: Model, objective: str = "gpu-relief") -> SharedPlan:
    return plan_together(
        models, ORIN, PlanOptions(objective=objective, tensorrt="10.3", min_gain=0.0)
    )


def times_file(folder: Path, *rows: tuple[str, str, float], **other: str) -> Path:
    """Write measured times: node, processor, microseconds."""
    head = {"profile": ORIN.name, "precision": "int8", "source": "a test"} | other
    lines = [f'{key} = "{value}"' for key, value in head.items()]
    for node, processor, time_us in rows:
        lines += ["[[times]]", f'nodes = ["{node}"]', f'processor = "{processor}"']
        lines.append(f"time_us = {time_us}")
    path = folder / "times.toml"
    path.write_text("\n".join(lines))
    return path


def placement(plan: Plan) -> dict[str, str]:
    return {row.node: row.processor for row in plan.placements}


def test_a_measured_time_moves_a_node(tmp_path):
    graph = convs(24, 256).graph
    (plain,) = planned(Model("m", graph), objective="throughput").plans
    moved = next(name for name, processor in placement(plain).items() if processor == "dla0")
    stays = next(name for name, processor in placement(plain).items() if processor == "gpu")
    slow = load_measured(times_file(tmp_path, (moved, "dla", 1e6)))
    (plan,) = planned(Model("m", graph, measured=slow), objective="throughput").plans
    assert placement(plan)[moved] == "gpu"
    slow = load_measured(times_file(tmp_path, (stays, "gpu", 1e6)))
    (plan,) = planned(Model("m", graph, measured=slow), objective="throughput").plans
    assert placement(plan)[stays] == "dla0"


def test_a_measured_time_is_the_one_in_the_plan(tmp_path):
    measured = load_measured(times_file(tmp_path, ("n3", "dla0", 77.5), ("n3", "gpu", 78.5)))
    (plan,) = planned(Model("m", convs(12).graph, measured=measured)).plans
    (row,) = [row for row in plan.placements if row.node == "n3"]
    assert row.predicted_us == {"dla0": 77.5, "gpu": 78.5}[row.processor]


@pytest.mark.parametrize(
    ("node", "other", "said"),
    [
        ("n0", {"profile": "orin-nx-8gb"}, "profile 'orin-nx-8gb'"),
        ("n0", {"precision": "fp16"}, "precision 'fp16'"),
        ("n0", {"power_mode": "30W"}, "power mode '30W'"),
        ("absent", {}, "'absent'"),
    ],
)
def test_measured_times_of_something_else_are_refused_by_the_command(node, other, said, tmp_path):
    onnx.save(ir.to_proto(convs(2)), tmp_path / "m.onnx")
    times = times_file(tmp_path, (node, "gpu", 5.0), **other)
    given = [str(tmp_path / "m.onnx"), "--profile", ORIN.name, "--measured", str(times)]
    done = CliRunner().invoke(plan_command, given)
    assert isinstance(done.exception, ConfigError)
    assert said in str(done.exception)


@pytest.mark.parametrize("objective", BUILD_GOALS)
def test_models_together_are_no_worse_than_without_a_solver(objective):
    models = [
        Model("a", convs(12).graph, rate_hz=60.0),
        Model("b", convs(20, 128).graph, rate_hz=30.0),
    ]
    shared = planned(*models, objective=objective)

    def value(index: int) -> float:
        rows = [(plan.figures[index], plan.rate_hz or 0.0) for plan in shared.plans]
        gpu = sum(row.gpu_us * rate for row, rate in rows) * 1e-6
        # The other processor's load: what is not the GPU's, and frames take turns on two cores.
        dla = sum((row.latency_us - row.gpu_us) * rate for row, rate in rows) * 1e-6 / 2
        return {
            "throughput": max(gpu, dla),
            "latency": sum(row.latency_us for row, _ in rows),
            "energy": sum(row.energy_mj * rate for row, rate in rows),
            "gpu-relief": gpu,
        }[objective]

    mine, *others = (value(index) for index in range(4))
    assert shared.plans[0].search.value == pytest.approx(mine)
    assert mine <= min(others) * (1 + 1e-9)


def test_a_workload_names_its_models_and_files_beside_it(tmp_path):
    file = tmp_path / "w.toml"
    file.write_text(
        '[[model]]\npath = "a.onnx"\nrate_hz = 30\ntable = "a.json"\n'
        '[[model]]\npath = "/models/b.onnx"\nname = "second"\nrate_hz = 5\n'
    )
    first, second = load_workload(file).model
    assert (first.title, first.path, first.table) == ("a", tmp_path / "a.onnx", tmp_path / "a.json")
    assert (second.title, second.path, second.table) == ("second", Path("/models/b.onnx"), None)
    assert (first.rate_hz, second.rate_hz) == (30.0, 5.0)


@pytest.mark.parametrize("rate", ["0", "-1", "100001", '"fast"'])
def test_a_rate_out_of_range_is_refused(rate, tmp_path):
    file = tmp_path / "w.toml"
    file.write_text(f'[[model]]\npath = "a.onnx"\nrate_hz = {rate}\n')
    with pytest.raises(PlanError, match="not a workload"):
        load_workload(file)
