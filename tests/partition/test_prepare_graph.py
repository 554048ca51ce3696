"""Rewrites for the DLA are kept only where the plan is better for them."""

from dataclasses import replace

import numpy as np
import pytest
from legalize_graphs import Net, floats, node, to_ir

from device.profile import load_profile
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.plan import Model, PlanOptions, make_plan, plan_together
from toolkit.partition.prepare_graph import prepare_graph
from toolkit.partition.solver.milp import Program


def gated_blocks(rng: np.random.Generator, count: int, channels: int, side: int) -> Net:
    """Convolutions with HardSwish, each gated by what a global average makes of it."""
    nodes, weights, data = [], {}, "x"
    for i in range(count):
        weights[f"w{i}"] = floats(rng, channels, channels, 3, 3)
        weights[f"v{i}"] = floats(rng, channels, channels, 1, 1)
        nodes += [
            node("Conv", f"{data} w{i}", f"c{i}", pads=[1] * 4),
            node("HardSwish", f"c{i}", f"h{i}"),
            node("GlobalAveragePool", f"h{i}", f"p{i}"),
            node("Conv", f"p{i} v{i}", f"g{i}"),
            node("HardSigmoid", f"g{i}", f"s{i}"),
            node("Mul", f"h{i} s{i}", f"m{i}"),
        ]
        data = f"m{i}"
    return Net(nodes, {"x": (1, channels, side, side)}, weights)


@pytest.mark.parametrize("profile", ["agx-orin-64gb", "orin-nx-8gb", "agx-xavier-32gb"])
@pytest.mark.parametrize("objective", ["throughput", "latency", "energy"])
def test_a_rewritten_graph_never_plans_worse_than_as_it_was(
    profile: str, objective: str, rng: np.random.Generator
) -> None:
    board, options = load_profile(profile), PlanOptions(objective=objective)
    for _ in range(2):
        size = int(rng.choice((16, 64, 192))), int(rng.choice((9, 28, 75)))
        graph = to_ir(gated_blocks(rng, int(rng.integers(1, 4)), *size).proto())
        before = make_plan(Model("m", graph.graph), board, options)
        prepared = prepare_graph(graph, board, options)
        after = make_plan(Model("m", prepared.model.graph, cuts=prepared.cuts), board, options)
        assert after.search.value <= before.search.value * 1.001


@pytest.mark.parametrize(
    ("profile", "rewritten"),
    [("agx-orin-64gb", (True, False, False)), ("orin-nx-8gb", (True,) * 2)],
)
def test_rewrites_gain_what_the_plan_asks_of_moves(
    profile: str, rewritten: tuple[bool, ...], rng: np.random.Generator
) -> None:
    graph = to_ir(gated_blocks(rng, 4, 64, 75).proto())
    board = load_profile(profile)
    for min_gain, applied in zip((0.0, None, 1.0), rewritten, strict=False):
        prepared = prepare_graph(graph, board, PlanOptions(min_gain=min_gain))
        assert bool(prepared.applied) == applied


@pytest.mark.parametrize("objective", ["throughput", "energy"])
def test_what_the_last_trial_proved_is_not_searched_again(
    objective: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, board = to_ir(gated_blocks(rng, 4, 64, 75).proto()), load_profile("orin-nx-8gb")
    options = PlanOptions(objective=objective)
    prepared = prepare_graph(graph, board, options)
    assert prepared.trial is not None
    model = Model("m", prepared.model.graph, cuts=prepared.cuts)
    fresh = make_plan(model, board, options)
    for search in ("relaxed", "minimise"):
        monkeypatch.setattr(Program, search, lambda *_, **__: pytest.fail("searched again"))
    again = plan_together((model,), board, options, {"m": prepared.trial}).plans[0]
    assert replace(again.search, seconds=0.0) == replace(fresh.search, seconds=0.0)
    assert again.placements == fresh.placements


def test_what_stays_in_floating_point_is_not_rewritten(rng: np.random.Generator) -> None:
    graph = to_ir(gated_blocks(rng, 4, 64, 75).proto())
    board, options = load_profile("orin-nx-8gb"), PlanOptions(min_gain=0.0)
    applied = prepare_graph(graph, board, options).applied
    assert len(applied) > 1
    keep = frozenset({applied[0].node})
    touched = {name for row in prepare_graph(graph, board, options, keep_float=keep).applied
        for name in row.replaced}  # fmt: skip
    assert not keep & touched
    in_fp16 = PlanOptions(min_gain=0.0, precision="fp16")
    free = prepare_graph(graph, board, in_fp16).applied
    assert prepare_graph(graph, board, in_fp16, keep_float=keep).applied == free


def test_a_plan_that_forces_all_onto_the_dla_keeps_every_rewrite(rng: np.random.Generator) -> None:
    graph = to_ir(gated_blocks(rng, 2, 64, 75).proto())
    board = load_profile("agx-orin-64gb")
    options = PlanOptions(min_gain=1.0, forced=Forced(dla=("all",)))
    assert not prepare_graph(graph, board, PlanOptions(min_gain=1.0)).applied
    prepared = prepare_graph(graph, board, options)
    assert prepared.applied
    assert not prepared.unused
    plan = make_plan(
        Model("m", prepared.model.graph, cuts=prepared.cuts, rewrites=prepared.applied),
        board,
        options,
    )
    replaced = {n for row in prepared.applied for n in row.nodes if n not in row.borders}
    assert {row.processor for row in plan.placements if row.node in replaced} == {"dla0"}
