"""Quantities in units that people read, and the options of trtexec."""

from dataclasses import replace
from functools import cache

import pytest

from device.engine.manifest import NodePlacement
from scripts.golden import GOLDENS
from toolkit.partition.planning.quantities import apart, number, pair, quantity
from toolkit.partition.planning.trtexec import patterns, trtexec_lines


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0, "us", "0 us"),
        (0.0123, "us", "0.0123 us"),
        (999.0, "us", "999 us"),
        (1000.0, "us", "1 ms"),
        (12596.0, "us", "12.6 ms"),
        (999_400.0, "us", "999 ms"),
        (2_500_000.0, "us", "2.5 s"),
        (173.88, "mJ", "174 mJ"),
        (2_457_600, "bytes", "2.34 MiB"),
        (500, "bytes", "500 bytes"),
        (0.25, "of the time", "0.25 of the time"),
    ],
)
def test_a_quantity_has_a_unit_that_makes_it_short(value, unit, text):
    assert quantity(value, unit) == text


@pytest.mark.parametrize("value", [1e-7, 0.5, 12345.6, 1e9])
def test_no_number_has_an_exponent(value):
    assert "e" not in number(value)
    assert float(number(value, 6)) == pytest.approx(value, rel=1e-5)


def test_values_beside_each_other_have_one_unit_and_differ_where_they_do():
    assert pair(12596.0, 8820.0, "us") == ("12.6", "8.82", "ms")
    assert apart(7033.0, 4199.0, "us") == ("7.033", "4.199")
    assert apart(4199.01, 4199.05, "us") == ("4.199", "4.1991")
    assert apart(5.0, 5.0, "us") == ("5", "5")


def matches(pattern, name):
    start, star, end = pattern.partition("*")
    return name.startswith(start) and name.endswith(end) if star else name == pattern


def test_patterns_match_all_of_the_names_and_no_other(rng):
    parts = ("a", "b", "head", "7")
    for _ in range(50):
        names = {"/" + "/".join(rng.choice(parts, size=int(rng.integers(1, 5)))) for _ in range(20)}
        ordered = sorted(names)
        chosen = [name for name in ordered if rng.random() < 0.5]
        others = [name for name in ordered if name not in chosen]
        actual = patterns(chosen, others)
        assert all(pattern.count("*") <= 1 for pattern in actual)
        assert [n for n in ordered if any(matches(p, n) for p in actual)] == chosen


@cache
def some_plan():
    return next(g for g in GOLDENS if g.path.stem == "plan_squeezenet_orin-nx-8gb_int8").plan()


def with_rows(*rows, tensorrt):
    placements = tuple(
        NodePlacement(
            node=name,
            op="Conv",
            processor=processor,
            segment="s",
            rule=rule,
            reason="r",
            predicted_us=1.0,
        )
        for name, processor, rule in rows
    )
    return replace(some_plan(), placements=placements, tensorrt=tensorrt)


ROWS = (("a", "dla0", ""), ("b:0", "gpu", "P2"), ("c", "gpu", "K1"), ("d,e", "gpu", "G4"))


@pytest.mark.parametrize(
    ("tensorrt", "has", "lacks"),
    [
        ("8.5.2", ("--int8", "--layerPrecisions"), ("--layerDeviceTypes=",)),
        ("8.6.0", ("--layerDeviceTypes=\"'b:0':GPU,c:GPU\"", '--layerPrecisions="c:fp16"'), ()),
        ("10.16", ("--int8", "--layerDeviceTypes", "--layerPrecisions"), ()),
        ("11.0", ("--layerDeviceTypes",), ("--int8", "--fp16", "--layerPrecisions", "--calib")),
    ],
)
def test_only_flags_that_the_release_has_are_given(tensorrt, has, lacks):
    line, *notes = trtexec_lines(with_rows(*ROWS, tensorrt=tensorrt))
    assert all(flag in line for flag in has)
    assert not any(flag in line for flag in lacks)
    assert notes[-1] == "left out, for trtexec cannot name them: 1 nodes such as d,e"
    assert ("cannot place single layers" in notes[0]) == (tensorrt == "8.5.2")
    assert "predicted for this command" in notes[-2]


@pytest.mark.parametrize(
    ("fallback_us", "gpu_us", "has"), [(2000.0, 6000.0, "--useDLACore"), (9000.0, 2600.0, "")]
)
def test_where_no_layer_can_be_placed_the_nearest_command_is_taken(fallback_us, gpu_us, has):
    plan = with_rows(*ROWS, tensorrt="8.5.2")
    rows = [replace(plan.figures[0], frames_per_second=400.0, latency_us=4000.0)]
    for name, latency_us in (("GPU only", gpu_us), ("DLA with fallback", fallback_us)):
        rows.append(replace(plan.figures[0], name=name, latency_us=latency_us))
    line, note, predicted, *_ = trtexec_lines(replace(plan, figures=tuple(rows), in_flight=5))
    assert ("--useDLACore=0 --allowGPUFallback" in line) == bool(has)
    assert ("nothing to the DLA" in note) != bool(has)
    hz = {True: "500", False: "385"}[bool(has)]
    assert f"{hz} frames/s; the plan reaches 400 with 5 frames in flight" in predicted


@pytest.mark.parametrize(
    ("objective", "has"),
    [("energy", False), ("gpu-relief", True), ("latency", True), ("throughput", False)],
)
def test_the_nearest_command_is_nearest_in_what_the_plan_is_for(objective, has):
    """With all on one DLA core a frame has the plan's GPU time, but 40 mJ in place of 26."""
    plan = with_rows(*ROWS, tensorrt="8.5.2")
    plan = replace(plan, search=replace(plan.search, objective=objective))
    rows = (
        ("this plan", 2460.0, 759.0, 26.0, 9.0, 1170.0),
        ("GPU only", 1310.0, 1310.0, 36.5, 14.0, 761.0),
        ("DLA with fallback", 3640.0, 760.0, 29.5, 18.0, 583.0),
    )
    fields = ("name", "latency_us", "gpu_us", "energy_mj", "idle_mj", "frames_per_second")
    figures = tuple(replace(plan.figures[0], **dict(zip(fields, r, strict=True))) for r in rows)
    line, *_ = trtexec_lines(replace(plan, figures=figures, in_flight=5))
    assert ("--useDLACore" in line) == has


@pytest.mark.parametrize(
    ("tensorrt", "names"), [("8.6.2", "h/a:GPU,h/b:GPU"), ("10.3.0", "h/*:GPU")]
)
def test_names_are_whole_for_releases_that_match_no_pattern(tensorrt, names):
    rows = (("a", "dla0", ""), ("h/a", "gpu", "P2"), ("h/b", "gpu", "P2"))
    line, *_ = trtexec_lines(with_rows(*rows, tensorrt=tensorrt))
    assert f'--layerDeviceTypes="{names}"' in line


def test_without_the_dla_there_is_no_line():
    assert trtexec_lines(with_rows(("a", "gpu", "P2"), tensorrt="10.3")) == []
    line, _ = trtexec_lines(with_rows(("a", "dla0", ""), tensorrt="10.3"))
    assert "Fallback" not in line
