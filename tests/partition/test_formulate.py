"""What the solver is told of a graph: the parts of a kernel cost on the GPU what it costs whole."""

import numpy as np
import pytest
from legalize_graphs import Net, floats, node, to_ir

from device.profile import load_profile
from toolkit.graph.node_view import NodeView, views
from toolkit.partition.costs.fusion import fuse
from toolkit.partition.costs.model import CostModel
from toolkit.partition.planning.formulate import Formulated, formulate

ORIN = load_profile("agx-orin-64gb")
OPS = ("Relu", "HardSwish", "Abs", "Sigmoid", "Erf", "Tanh")


def one_kernel(rng: np.random.Generator, count: int) -> tuple[NodeView, ...]:
    """A convolution with pointwise nodes behind it, at random."""
    ops = rng.choice(OPS, count)
    nodes = [node("Conv", "x w", "t0", pads=[1] * 4)]
    nodes += [node(str(op), f"t{i}", f"t{i + 1}") for i, op in enumerate(ops)]
    weights = {"w": floats(rng, 32, 32, 3, 3)}
    return views(to_ir(Net(nodes, {"x": (1, 32, 56, 56)}, weights).proto()).graph)


def formulate_nodes(seen: tuple[NodeView, ...], refused: set[str], costs: CostModel) -> Formulated:
    ends = [seen[-1].outputs[0].name]
    return formulate("m", seen, refused, costs, ("gpu", "dla0"), outputs=ends)


def test_on_the_gpu_a_parted_kernel_costs_what_it_does_whole(rng: np.random.Generator) -> None:
    for _ in range(10):
        seen = one_kernel(rng, int(rng.integers(1, 7)))
        costs = CostModel(seen, ORIN, precision="int8")
        (whole,) = costs.price(fuse(seen), "gpu")
        refused = {view.name for view in seen if rng.random() < 0.5}
        tasks = formulate_nodes(seen, refused, costs).network.tasks
        assert sum(task.time_us["gpu"] for task in tasks) == pytest.approx(whole.time_us)
        energies = [task.energy_mj["gpu"] for task in tasks]
        assert sum(energies) == pytest.approx(whole.energy_mj)


def test_behind_the_dla_a_part_costs_what_it_does_alone(rng: np.random.Generator) -> None:
    seen = one_kernel(rng, 1)
    costs = CostModel(seen, ORIN, precision="int8")
    network = formulate_nodes(seen, {seen[1].name}, costs).network
    conv, behind = network.tasks
    assert set(conv.time_us) == {"gpu", "dla0"}
    assert set(behind.time_us) == {"gpu"}
    (flow,) = [flow for flow in network.flows if flow.source == conv.name]
    alone = costs.alone(seen[1], "gpu")
    switch = costs.crossing(flow.bytes, "dla0", "gpu")
    paid = behind.time_us["gpu"] + flow.crossing_us["to_gpu"]
    assert paid == pytest.approx(alone.time_us + switch.time_us)
    paid = behind.energy_mj["gpu"] + flow.crossing_mj["to_gpu"]
    assert paid == pytest.approx(alone.energy_mj + switch.energy_mj)
    assert flow.crossing_us["to_dla"] == costs.crossing(flow.bytes, "gpu", "dla0").time_us


def test_tasks_are_in_an_order_in_which_they_can_run(rng: np.random.Generator) -> None:
    for _ in range(10):
        seen = one_kernel(rng, 6)
        refused = {view.name for view in seen if rng.random() < 0.5}
        network = formulate_nodes(seen, refused, CostModel(seen, ORIN, precision="int8")).network
        place = {task.name: index for index, task in enumerate(network.tasks)}
        for flow in network.flows:
            if flow.source is not None:
                assert all(place[flow.source] < place[target] for target in flow.targets)
