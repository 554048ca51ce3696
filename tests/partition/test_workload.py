"""Several models on one board, and times from a board in place of predicted ones."""

from pathlib import Path

import msgspec
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
from toolkit.partition.planning.services import Service, networks_of
from toolkit.partition.planning.workload import load_workload

ORIN = load_profile("agx-orin-64gb")


def convs(count: int, channels: int = 64) -> ir.Model:
    """Convolutions n0, n1, ... that the DLA takes."""
    nodes, weights, data = [], {}, "x"
    for index in range(count):
        output = "y" if index == count - 1 else f"t{index}"
        weights[f"w{index}"] = constant(channels, channels, 3, 3)
        reads = [data, f"w{index}"]
        nodes.append(helper.make_node("Conv", reads, [output], name=f"n{index}", pads=[1] * 4))
        data = output
    return graph_of(nodes, {"x": (1, channels, 56, 56)}, ["y"], weights)


def planned(*models: Model, objective: str = "gpu-relief") -> SharedPlan:
    return plan_together(
        models, ORIN, PlanOptions(objective=objective, tensorrt="10.3", min_gain=0.0)
    )


def times_file(folder: Path, *rows: tuple[str, str, float], **columns: str) -> Path:
    """Write measured times: node, processor, microseconds."""
    head = {"profile": ORIN.name, "precision": "int8", "source": "a test"} | columns
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
    ("node", "changes", "message"),
    [
        ("n0", {"profile": "orin-nx-8gb"}, "profile 'orin-nx-8gb'"),
        ("n0", {"precision": "fp16"}, "precision 'fp16'"),
        ("n0", {"power_mode": "30W"}, "power mode '30W'"),
        ("absent", {}, "'absent'"),
    ],
)
def test_measured_times_of_something_else_are_refused_by_the_command(
    node, changes, message, tmp_path
):
    onnx.save(ir.to_proto(convs(2)), tmp_path / "m.onnx")
    times = times_file(tmp_path, (node, "gpu", 5.0), **changes)
    given = [str(tmp_path / "m.onnx"), "--profile", ORIN.name, "--measured", str(times)]
    done = CliRunner().invoke(plan_command, given)
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)


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


def test_a_service_takes_its_share_of_the_gpu_from_the_models() -> None:
    graph = convs(12, 128).graph
    options = PlanOptions(objective="throughput", tensorrt="10.3", min_gain=0.0)
    vlm = Service(name="vlm", memory_mb=3500, gpu_share=0.4, memory_gbps=40.0)
    model = Model("m", graph, rate_hz=200.0)
    alone = plan_together((model,), ORIN, options)
    shared = plan_together((model,), ORIN, options, services=(vlm,))
    assert alone.memory is None
    before, after = (row.simulated.utilisation["gpu"] for row in (alone, shared))
    assert 0.0 <= after - 0.4 <= before + 0.01
    assert shared.plans[0].name == "m"
    assert len(shared.plans) == 1
    load = shared.placed.problem.networks[-1]
    assert (load.name, load.rate_hz) == ("vlm", 100.0)
    assert load.tasks[0].time_us == {"gpu": pytest.approx(4000.0)}
    p99 = [row.simulated.of("m").p99_us for row in (alone, shared)]
    assert p99[1] >= p99[0]
    whole = msgspec.structs.replace(vlm, gpu_share=1.0)
    heavy = Model("m", graph_of_gpu_only(), rate_hz=100.0)
    with pytest.raises(PlanError, match="the rates of m, vlm do not fit: gpu: busy"):
        plan_together((heavy,), ORIN, options, services=(whole,))


def graph_of_gpu_only() -> ir.Graph:
    """A graph whose node the DLA never takes."""
    return graph_of(
        [helper.make_node("Erf", ["x"], ["y"], name="n")], {"x": (1, 64, 56, 56)}, ["y"]
    ).graph


def test_services_and_weights_that_exceed_the_board_are_refused_by_their_sum() -> None:
    board = load_profile("orin-nano-8gb")
    options = PlanOptions(objective="throughput", tensorrt="10.3")
    model = Model("m", convs(2).graph)
    fits = plan_together((model,), board, options, services=(Service(name="vlm", memory_mb=3500),))
    assert fits.memory is not None
    assert fits.memory.shares == {"vlm": 3500 * 2**20, "weights of m": 2 * 64 * 64 * 9}
    assert "MiB are left for activations, CUDA and the system" in fits.memory.text
    large = (Service(name="vlm", memory_mb=8000), Service(name="system", memory_mb=1500))
    with pytest.raises(PlanError) as caught:
        plan_together((model,), board, options, services=large)
    assert str(caught.value) == (
        "vlm 8,000 + system 1,500 + weights of m 0 = 9,500 MiB, orin-nano-8gb has 8,192 MiB: take"
        " smaller models, or a board with more memory"
    )


def test_a_board_without_a_gpu_runs_no_share_of_one() -> None:
    load = Service(name="vlm", memory_mb=1, gpu_share=0.1)
    with pytest.raises(PlanError, match="the service vlm takes 10% of the GPU"):
        networks_of((load,), msgspec.structs.replace(ORIN, gpu=None))
