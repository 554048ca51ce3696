"""What a plan says of the Super clocks of its module."""

import re

import pytest

from device.profile import load_profile
from scripts.networks import NETWORKS
from toolkit.graph.node_view import views
from toolkit.partition.planning.plan import Model, PlanOptions, make_plan
from toolkit.partition.planning.super_clocks import super_notes


def notes_of(profile: str, jetpack: str | None = None, **options) -> tuple[str, ...]:
    graph = NETWORKS["resnet18"].model().graph
    plan = make_plan(
        Model("m", graph), load_profile(profile), PlanOptions(tensorrt="10.3", **options)
    )
    return super_notes(plan, views(graph), jetpack)


def test_a_plan_for_orin_nx_says_what_super_clocks_change() -> None:
    (note,) = notes_of("orin-nx-16gb", precision="int8")
    assert "the GPU at 1173 instead of 918 MHz, the DLA at 1229 instead of 614 MHz" in note
    assert note.endswith("(profile orin-nx-16gb-super)")
    match = re.search(r"take ([\d.]+) (ms|us) instead of ([\d.]+) (ms|us)", note)
    assert match
    after, before = (
        float(value) * {"ms": 1e3, "us": 1}[unit]
        for value, unit in ((match[1], match[2]), (match[3], match[4]))
    )
    assert 918 / 1173 / 1.6 < after / before < 0.9


def test_a_module_without_dla_is_said_to_have_a_faster_gpu_only() -> None:
    (note,) = notes_of("orin-nano-8gb")
    assert "the GPU at 1020 instead of 625 MHz" in note
    assert "DLA" not in note


@pytest.mark.parametrize(
    ("profile", "mode"),
    [("agx-orin-64gb", None), ("orin-nx-16gb-super", None), ("orin-nx-16gb", "25W")],
)
def test_nothing_is_said_where_there_are_no_other_clocks_to_have(
    profile: str, mode: str | None
) -> None:
    assert notes_of(profile, power_mode=mode) == ()


@pytest.mark.parametrize(("jetpack", "count"), [("5.1.2", 0), ("6.1", 0), ("6.2", 1), (None, 1)])
def test_a_jetpack_without_super_clocks_gets_no_note(jetpack: str | None, count: int) -> None:
    assert len(notes_of("orin-nx-16gb", jetpack)) == count
