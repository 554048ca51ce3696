"""Placement: rules first, then scales, then whether an island fits, pays and is among the few."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from planning_graphs import constant, one_node

from device.manifest import Precision
from device.profile import load_profile
from toolkit.planning.node_view import NodeView
from toolkit.planning.placement import Placement, place

ORIN = load_profile("agx-orin-64gb")
NANO = load_profile("orin-nano-8gb")
LAPTOP = load_profile("laptop")


def conv(size: int = 56, batch: int = 1) -> NodeView:
    shape = (batch, 256, size, size)
    return one_node("Conv", [shape, constant(256, 256, 3, 3)], shape, pads=[1] * 4)


def erf(size: int = 56) -> NodeView:
    shape = (1, 256, size, size)
    return one_node("Erf", [shape], shape)


def chain(*nodes: NodeView) -> tuple[NodeView, ...]:
    """Join nodes one after the other: n0 reads t0 and makes t1, n1 reads t1, and so on."""
    joined = []
    for index, node in enumerate(nodes):
        first = replace(node.inputs[0], name=f"t{index}")
        joined.append(
            replace(
                node,
                name=f"n{index}",
                inputs=(first, *node.inputs[1:]),
                outputs=(replace(node.outputs[0], name=f"t{index + 1}"),),
                reads=(f"t{index}",),
            )
        )
    return tuple(joined)


def placed(
    nodes: tuple[NodeView, ...],
    precision: Precision = "int8",
    has_scale: Callable[[str], bool] = lambda name: True,
    **options: int,
) -> tuple[Placement, ...]:
    return place(nodes, ORIN, precision, None, has_scale, **options)


def rules(placements: tuple[Placement, ...]) -> list[str]:
    return [p.rule if p.processor == "gpu" else p.processor for p in placements]


def test_nodes_that_pass_go_to_the_dla_and_others_to_the_gpu():
    placements = placed(chain(*[conv()] * 6, erf()))
    assert rules(placements) == ["dla0"] * 6 + ["op.not-exposed"]
    assert placements[-1].reason == "operator Erf, but TensorRT does not offer it on the DLA"
    assert all(p.rule == "" for p in placements[:6])


def test_a_profile_without_dla_gets_the_gpu_alone():
    placements = place(chain(conv(), erf()), NANO, "int8", None, lambda name: True)
    assert {p.processor for p in placements} == {"gpu"}
    assert {p.reason for p in placements} == {"profile has no DLA"}


def test_a_profile_without_gpu_gets_the_cpu_alone():
    placements = place(chain(conv(), erf()), LAPTOP, "fp32", None, lambda name: True)
    assert {p.processor for p in placements} == {"cpu"}
    assert {p.reason for p in placements} == {"profile has no GPU"}


def test_int8_needs_a_scale_on_every_side():
    nodes = chain(*[conv()] * 12)
    placements = placed(nodes, has_scale=lambda name: name != "t6")
    assert rules(placements) == ["dla0"] * 5 + ["S1"] * 2 + ["dla0"] * 5
    assert "'t6'" in placements[5].reason


def test_fp16_needs_no_scale():
    xavier = load_profile("agx-xavier-32gb")
    placements = place(chain(*[conv()] * 6), xavier, "fp16", None, lambda name: False)
    assert {p.processor for p in placements} == {"dla0"}


def test_fp32_stays_on_the_gpu():
    assert rules(placed(chain(conv(), conv()), "fp32")) == ["G1", "G1"]


def test_an_island_that_does_not_pay_goes_to_the_gpu_with_the_numbers():
    placements = placed(chain(*[conv()] * 12, erf(), conv(7), erf()))
    assert rules(placements) == ["dla0"] * 12 + ["op.not-exposed", "P2", "op.not-exposed"]
    reason = placements[13].reason
    assert "island of 1 node would relieve the GPU of" in reason
    assert "two crossings cost 9" in reason  # two times 49 us and the bytes


def test_an_island_pays_from_the_cost_of_its_two_crossings_on():
    kinds = [placed(chain(*[conv(7)] * count))[0].rule for count in range(1, 20)]
    assert kinds[0] == "P2"
    assert kinds[-1] == ""
    assert kinds == sorted(kinds, reverse=True)  # once it pays, more of it pays too


def islands(*lengths: int) -> tuple[NodeView, ...]:
    nodes = [node for length in lengths for node in [*[conv()] * length, erf()]]
    return chain(*nodes)


def test_the_largest_islands_stay_where_there_are_more_than_the_target():
    placements = placed(islands(8, 11, 7, 10, 9, 6))
    kept = [p.node for p in placements if p.processor == "dla0"]
    assert len(kept) == 8 + 11 + 10 + 9
    capped = [p for p in placements if p.rule == "G6"]
    assert len(capped) == 7 + 6
    assert "its island is number 5 of 6 by GPU time" in capped[0].reason


def test_a_core_never_gets_more_than_sixteen_islands():
    placements = placed(islands(*[6] * 18), max_islands=100)
    assert sum(p.rule == "G6" for p in placements) == 2 * 6


def heavy(elements: int) -> NodeView:
    """A convolution whose weights are as many as told, without holding them."""
    node = conv()
    weights = replace(node.inputs[1], shape=(elements // (256 * 9), 256, 3, 3))
    return replace(node, inputs=(node.inputs[0], weights), macs=10**12)


@pytest.mark.parametrize(("mib", "rule"), [(255, ""), (256, "G9")])
def test_weights_of_an_island_stay_below_512_mib(mib, rule):
    unit = 256 * 9
    elements = -(-(mib * 2**20) // unit) * unit
    placements = placed(chain(heavy(elements), heavy(elements)))
    assert {p.rule for p in placements} == {rule}
    if rule:
        assert "512 MiB of weights" in placements[0].reason


def wide(rows: int) -> tuple[NodeView, NodeView]:
    """Two nodes with `rows` MiB in INT8 between them, and little that crosses."""
    narrow, broad = (1, 1, 8 * rows, 512), (1, 256, 8 * rows, 512)
    return (
        one_node("Conv", [narrow, constant(256, 1, 1, 1)], broad),
        one_node("Conv", [broad, constant(1, 256, 1, 1)], narrow),
    )


@pytest.mark.parametrize(("mib", "rule"), [(1023, ""), (1024, "G8")])
def test_intermediates_of_an_island_stay_below_one_gib(mib, rule):
    placements = placed(chain(*wide(mib)))
    assert {p.rule for p in placements} == {rule}


def test_nodes_of_another_batch_form_their_own_island():
    mixed = chain(*[conv()] * 6, *[conv(batch=2)] * 6)
    placements = placed(mixed, max_islands=1)
    assert rules(placements) == ["G6"] * 6 + ["dla0"] * 6


def test_a_loadable_of_one_batch_is_one_island():
    assert rules(placed(chain(*[conv()] * 12), max_islands=1)) == ["dla0"] * 12


def test_every_node_is_placed_in_order():
    nodes = islands(3, 1, 6)
    assert [p.node for p in placed(nodes)] == [node.name for node in nodes]
