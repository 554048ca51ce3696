"""What one DLA core holds (rules G6, G8, G9), in the plans of graphs that go beyond it."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest

from device.profile import load_profile
from toolkit.dla.rules.explain import rule_lines
from toolkit.dla.rules.memory import CORE_RULES, LOADABLE_RULES, Core, Loadable
from toolkit.dla.rules.verdicts import situation_of
from toolkit.partition.planning.loadables import limits_of
from toolkit.partition.planning.plan import Model, Plan, PlanOptions, SharedPlan, plan_together
from toolkit.partition.planning.plan_text import render_plan

ORIN, XAVIER = load_profile("agx-orin-64gb"), load_profile("agx-xavier-32gb")
MIB = 2**20


def chain(ops: Sequence[str], channels: int, height: int, width: int, kernel: int = 1) -> ir.Model:
    """A chain of nodes n0, n1, ... of one shape; weights share one number, and take no memory."""
    shape = ir.Shape((1, channels, height, width))
    data = start = ir.val("x", ir.DataType.FLOAT, shape)
    weights, nodes = [], []
    for index, op in enumerate(ops):
        reads = [data]
        if op == "Conv":
            size = channels, channels, kernel, kernel
            array = np.broadcast_to(np.float32(1), size)
            weight = ir.Value(
                name=f"w{index}",
                shape=ir.Shape(size),
                type=ir.TensorType(ir.DataType.FLOAT),
                const_value=ir.Tensor(array, name=f"w{index}"),
            )
            weights.append(weight)
            reads.append(weight)
        pads = {"pads": [kernel // 2] * 4} if op == "Conv" else {}
        node = ir.node(op, reads, pads, name=f"n{index}")
        (data,) = node.outputs
        data.name, data.shape, data.type = f"t{index}", shape, start.type
        nodes.append(node)
    graph = ir.Graph(
        [start], [data], nodes=nodes, initializers=weights, opset_imports={"": 19}, name="chain"
    )
    return ir.Model(graph, ir_version=10)


def islands(count: int) -> ir.Model:
    """Islands that the DLA takes, with a node that it refuses between each two."""
    ops = ["Erf"]
    for _ in range(count):
        ops += ["Conv"] * 4 + ["Erf"]
    return chain(ops, 256, 56, 56, kernel=3)


def shared_of(*models: ir.Model, profile=ORIN, precision="int8", tensorrt="10.3") -> SharedPlan:
    options = PlanOptions(precision=precision, tensorrt=tensorrt, objective="gpu-relief")
    named = tuple(Model(f"m{index}", model.graph) for index, model in enumerate(models))
    return plan_together(named, profile, options)


def plan_of(model: ir.Model, **options) -> Plan:
    return shared_of(model, **options).plans[0]


def on_dla(plan: Plan) -> list[tuple[str, ...]]:
    """The nodes of each loadable."""
    return [segment.nodes for segment in plan.segments if segment.processor == "dla0"]


def reasons(plan: Plan) -> list[str]:
    """Why nodes that the DLA takes are on the GPU."""
    return [row.reason for row in plan.placements if row.rule == "P2"]


# fmt: off
CAPS = [  # TensorRT, the rule, and how many loadables a core holds
    ("5.0", "G6.7", 8), ("7.1.3", "G6.7", 8),
    ("8.0.1", "G6.8-4", 4), ("8.4.1", "G6.8-4", 4),
    ("8.5.2", "G6", 16), ("8.6.2", "G6", 16), ("10.3.0", "G6", 16),
]
# fmt: on


def refused_by(rules, subject, situation):
    return [line.rule for line in rule_lines(rules, subject, situation) if line.status == "refused"]


@pytest.mark.parametrize(("tensorrt", "rule", "most"), CAPS)
def test_the_solver_gets_the_rows_that_hold_for_the_build(tensorrt, rule, most):
    limits = limits_of(XAVIER, tensorrt, "int8", 5)
    assert (limits.loadables_rule, limits.max_loadables) == (rule, most)
    assert limits.max_crossings == 5
    situation = situation_of(XAVIER.dla, tensorrt, "int8")
    assert refused_by(CORE_RULES, Core("dla0", limits.max_loadables), situation) == []
    assert refused_by(CORE_RULES, Core("dla0", limits.max_loadables + 1), situation) == [rule]


def test_sizes_below_the_solvers_limits_pass_the_rows_and_sizes_at_them_do_not():
    limits = limits_of(ORIN, "10.3", "int8", None)
    weights, inside = limits.weight_bytes, limits.intermediate_bytes
    assert (weights, inside) == (512 * MIB, 1024 * MIB)
    situation = situation_of(ORIN.dla, "10.3", "int8")
    below = Loadable("s", (1,), weights - 1, inside - 1)
    at = Loadable("s", (1,), weights, inside)
    assert refused_by(LOADABLE_RULES, below, situation) == []
    assert refused_by(LOADABLE_RULES, at, situation) == ["G8", "G9"]


@pytest.mark.parametrize(
    ("tensorrt", "rule", "most"), [("8.4.1", "G6.8-4", 4), ("7.1.3", "G6.7", 8)]
)
@pytest.mark.parametrize("beyond", [0, 1, 5])
def test_old_caps_of_loadables_hold_and_are_named(tensorrt, rule, most, beyond):
    plan = plan_of(islands(most + beyond), profile=XAVIER, precision="fp16", tensorrt=tensorrt)
    assert len(on_dla(plan)) == most
    assert len(reasons(plan)) == 4 * beyond
    assert all(f"at most {most} ({rule})" in reason for reason in reasons(plan))
    assert f"{most} of {most} loadables a core ({rule})" in render_plan(plan)


@pytest.mark.parametrize("count", [16, 17, 20])
def test_a_core_gets_16_loadables_and_the_rest_says_why(count):
    plan = plan_of(islands(count))
    assert len(on_dla(plan)) == 16
    assert len(reasons(plan)) == 4 * (count - 16)
    assert all("17 loadables, at most 16 (G6)" in reason for reason in reasons(plan))
    assert plan.search.proven


def test_models_share_the_loadables_of_a_core():
    shared = shared_of(islands(10), islands(9))
    assert sum(len(on_dla(plan)) for plan in shared.plans) == 16
    refusals = [reason for plan in shared.plans for reason in reasons(plan)]
    assert len(refusals) == 4 * 3
    assert all("(G6)" in reason for reason in refusals)


def check_pieces(plan: Plan, weight: int, tensor: int) -> None:
    """Sum by hand what each loadable of a chain holds, and compare with its limits."""
    assert plan.memory is not None
    held = {row.name: row for row in plan.memory.loadables}
    for segment in plan.segments:
        if segment.processor == "dla0":
            row = held[segment.name]
            assert row.weight_bytes == weight * len(segment.nodes) < 512 * MIB
            assert row.intermediate_bytes == tensor * (len(segment.nodes) - 1) < 1024 * MIB


# 8192 channels, the most a convolution on the DLA may have: 64 MiB of weights each in INT8.
@pytest.mark.parametrize(("convs", "on_gpu"), [(7, 0), (8, 1), (11, 1), (15, 1), (16, 2)])
def test_weights_of_512_mib_are_parted_by_a_node_on_the_gpu(convs, on_gpu):
    plan = plan_of(chain(["Conv"] * convs, 8192, 4, 4))
    check_pieces(plan, 64 * MIB, 8192 * 4 * 4)
    assert sum(map(len, on_dla(plan))) == convs - on_gpu
    assert len(reasons(plan)) == on_gpu
    assert all(f"below {512 * MIB} (G9)" in reason for reason in reasons(plan))


# Tensors of 256 MiB in either precision, the height 8192 being the most that the DLA takes.
@pytest.mark.parametrize(
    ("board", "precision", "width", "size"), [(ORIN, "int8", 512, 1), (XAVIER, "fp16", 256, 2)]
)
@pytest.mark.parametrize(("convs", "on_gpu"), [(4, 0), (5, 1), (9, 1), (10, 2)])
def test_intermediates_of_1_gib_are_parted_by_a_node_on_the_gpu(
    board, precision, width, size, convs, on_gpu
):
    model = chain(["Conv"] * convs, 64, 8192, width, kernel=3)
    plan = plan_of(model, profile=board, precision=precision, tensorrt="8.5.2")
    check_pieces(plan, 64 * 64 * 9 * size, 64 * 8192 * width * size)
    assert sum(map(len, on_dla(plan))) == convs - on_gpu
    assert len(reasons(plan)) == on_gpu
    assert all(f"below {1024 * MIB} (G8)" in reason for reason in reasons(plan))
