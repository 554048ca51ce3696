"""The simulator against the model, by hand, and against published measurements."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from contention_models import XAVIER, OwnDemand, Region, SharedBandwidth
from scheduling_problems import THREE, TWO, haxconn, problem_of, random_network

from toolkit.errors import PlanError
from toolkit.partition.solver.assess import assess, utilisation
from toolkit.partition.solver.problem import Flow, Network, Problem, Task
from toolkit.partition.solver.simulate import CROSSING, Traffic, simulate
from toolkit.partition.solver.solve import solve


def random_placement(rng, net):
    return {task.name: str(rng.choice(list(task.time_us))) for task in net.tasks}


@pytest.mark.parametrize("processors", [TWO, THREE])
def test_one_frame_at_a_time_takes_the_latency_of_the_model(processors, rng):
    for _ in range(10):
        net = random_network(rng, int(rng.integers(1, 9)), processors)
        problem = problem_of(rng, net, processors=processors)
        placement = random_placement(rng, net)
        cost = assess(problem, net, placement)
        report = simulate(problem, {"net": placement}, duration_us=20.5 * cost.latency_us)
        stats = report.of("net")
        assert stats.frames == 20
        for actual in (stats.mean_us, stats.p50_us, stats.p99_us, 1e6 / stats.throughput_hz):
            assert actual == pytest.approx(cost.latency_us)
        assert report.power_mw == pytest.approx(
            20 * cost.energy_mj / (20.5 * cost.latency_us) * 1e6
        )


def test_frames_enough_in_flight_keep_the_busiest_processor_busy(rng):
    """Where a frame visits the DLA once. Where it returns, first in, first out can starve both."""
    simple = 0
    while simple < 8:
        problem = problem_of(rng, random_network(rng, 10, TWO))
        solution = solve(problem, "utilisation")
        report = simulate(
            problem,
            solution.placement,
            [Traffic("net", in_flight=40)],
            # Frames that were half done at the start count as whole: 50 of 1000 were seen.
            duration_us=4000 * solution.value,
            warmup_us=200 * solution.value,
        )
        busiest = max(report.utilisation.values())
        assert busiest <= 1 + 1e-9
        if sum(s.processor == "dla0" for s in solution.segments) <= 1:
            simple += 1
            assert busiest == pytest.approx(1, rel=0.001)
            rate_hz = report.of("net").throughput_hz
            assert rate_hz == pytest.approx(1e6 / solution.value, rel=0.04)


def test_no_traffic_gets_more_through_than_the_busiest_processor_allows(rng):
    for _ in range(10):
        net = random_network(rng, 8, THREE)
        problem = problem_of(rng, net, processors=THREE)
        placement = random_placement(rng, net)
        busiest = max(assess(problem, net, placement).load_us.values())
        flood = [Traffic("net", in_flight=int(rng.integers(1, 20)))]
        report = simulate(problem, {"net": placement}, flood, duration_us=500 * busiest)
        assert max(report.utilisation.values()) <= 1 + 1e-9
        assert report.of("net").frames * busiest <= 500 * busiest + 1e-6


def test_utilisation_at_rates_is_that_of_the_model(rng):
    for _ in range(5):
        nets = tuple(
            replace(random_network(rng, 5, TWO, name), rate_hz=rate)
            for name, rate in (("one", 2000.0), ("two", 1000.0))
        )
        problem = problem_of(rng, *nets)
        solution = solve(problem, "utilisation")
        if solution.value > 0.9:
            continue
        report = simulate(problem, solution.placement, duration_us=2e5)
        costs = {n.name: assess(problem, n, solution.placement[n.name]) for n in nets}
        for processor, share in utilisation(problem, costs).items():
            assert report.utilisation[processor] == pytest.approx(share, abs=0.01)
        assert report.of("one").throughput_hz == pytest.approx(2000, rel=0.01)


def test_a_processor_runs_one_thing_at_a_time_and_a_frame_one_after_the_other(rng):
    nets = tuple(random_network(rng, 6, THREE, name) for name in ("one", "two"))
    problem = problem_of(rng, *nets, processors=THREE)
    placement = {net.name: random_placement(rng, net) for net in nets}
    flood = [Traffic(net.name, in_flight=3) for net in nets]
    intervals = simulate(problem, placement, flood, duration_us=2000).intervals
    for key in (lambda i: i.processor, lambda i: (i.network, i.frame)):
        for group in {key(i) for i in intervals}:
            rows = sorted((i.start_us, i.end_us) for i in intervals if key(i) == group)
            assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(rows))


def one_task(name, processor, time_us, **fields):
    return Network(name, (Task("t", {processor: time_us}, **fields),), ())


def test_queues_by_hand():
    """Service of 10 us every 8 us: frame k waits 2k us. One of 6 us every 10 us never waits."""
    problem = Problem((one_task("n", "gpu", 10.0),), ("gpu",))
    placement = {"n": {"t": "gpu"}}
    slow = simulate(problem, placement, [Traffic("n", rate_hz=125e3)], duration_us=100.5)
    assert slow.of("n").frames == 10
    assert slow.of("n").mean_us == pytest.approx(np.mean([10 + 2 * k for k in range(10)]))
    assert slow.of("n").p50_us == pytest.approx(19)
    quick = Problem((one_task("n", "gpu", 6.0),), ("gpu",))
    report = simulate(quick, placement, [Traffic("n", rate_hz=100e3)], duration_us=1000)
    assert report.of("n").p99_us == pytest.approx(6)
    assert report.utilisation["gpu"] == pytest.approx(0.6)


def test_two_stages_overlap_by_hand():
    """GPU 4 us, crossing 1 us on the GPU, DLA 10 us: two in flight fill the DLA."""
    tasks = (Task("a", {"gpu": 4.0}), Task("b", {"dla0": 10.0}))
    net = Network("n", tasks, (Flow("f", "a", ("b",), crossing_us={"to_dla": 1.0}),))
    placement = {"n": {"a": "gpu", "b": "dla0"}}
    problem = Problem((net,), TWO)
    two = [Traffic("n", in_flight=2)]
    report = simulate(problem, placement, two, duration_us=1000, warmup_us=100)
    assert report.of("n").throughput_hz == pytest.approx(1e5)
    assert report.of("n").p50_us == pytest.approx(20)
    assert report.utilisation == pytest.approx({"gpu": 0.5, "dla0": 1.0})
    first = [i for i in report.intervals if i.frame == 0]
    assert [(i.segment, i.processor, i.start_us, i.end_us) for i in first] == [
        (0, "gpu", 0, 4),
        (CROSSING, "gpu", 8, 9),  # the second frame asked for the GPU first
        (1, "dla0", 9, 19),
    ]


def test_alternating_cores_halve_the_time_of_a_frame():
    problem = Problem((one_task("n", "dla0", 10.0),), TWO, alternate_dlas=True)
    placement = {"n": {"t": "dla0"}}
    two = [Traffic("n", in_flight=2)]
    report = simulate(problem, placement, two, duration_us=1000.5)
    assert report.of("n").throughput_hz == pytest.approx(2e5, rel=0.01)
    assert report.utilisation == pytest.approx({"gpu": 0, "dla0": 1, "dla1": 1}, rel=0.01)


def test_contention_by_hand():
    """Demands of 60 and 40 on a memory of 80 run at 0.8; what is left then runs at full speed."""
    nets = (
        one_task("g", "gpu", 80.0, memory_gbps={"gpu": 60.0}),
        one_task("d", "dla0", 40.0, memory_gbps={"dla0": 40.0}),
    )
    problem = Problem(nets, TWO, contention=SharedBandwidth(80.0))
    placement = {"g": {"t": "gpu"}, "d": {"t": "dla0"}}
    report = simulate(
        problem, placement, [Traffic("d", offset_us=10.0), Traffic("g")], duration_us=92
    )
    # g alone to 10, at 0.8 with d to 60, the next d joins at once.
    assert [i.end_us for i in report.intervals] == pytest.approx([60.0])
    lone = replace(problem, networks=nets[:1])
    assert simulate(lone, placement, duration_us=81).of("g").mean_us == pytest.approx(80)


def test_piecewise_contention_counts_only_beside_others():
    curve = OwnDemand({"gpu": (Region(10.0, 0.0, 1.0), Region(100.0, -5.0, 2.0))})
    assert curve.speed("gpu", 8.0, 0.0) == 1.0
    assert curve.speed("gpu", 8.0, 1.0) == pytest.approx(0.92)
    assert curve.speed("gpu", 10.0, 1.0) == pytest.approx(0.9)
    assert curve.speed("gpu", 30.0, 1.0) == pytest.approx(0.5)
    assert curve.speed("dla0", 30.0, 1.0) == 1.0
    assert 0 < curve.speed("gpu", 1000.0, 1.0) < 0.1


def test_traffic_of_unknown_networks_is_refused():
    problem = Problem((one_task("n", "gpu", 10.0),), ("gpu",))
    with pytest.raises(PlanError, match="'m'"):
        simulate(problem, {"n": {"t": "gpu"}}, [Traffic("m")], duration_us=1)


# ResNet-50, INT8, batch 1 on AGX Orin, frames a second alone and together (published_figures.csv).
ALONE = {"gpu": 981.0, "dla0": 779.0, "dla1": 775.0}
# What a network on the DLA does on the GPU, in us: input and output are reformatted there, measured
# for GoogLeNet INT8 on Orin (0.041 and 0.017 ms), and two small layers fall back (global average
# pooling, flatten); a softmax of the same network takes 0.019 ms, taken for each of them.
COPY_IN_US, COPY_OUT_US, SMALL_LAYER_US = 41.0, 17.0, 19.0
# trtexec keeps one inference queued behind the one that runs (its `overlap` is on by default).
IN_FLIGHT = 2


def resnet(processor):
    """ResNet-50 with its time alone; on the DLA with the parts that run on the GPU."""
    whole = 1e6 / ALONE[processor]
    if processor == "gpu":
        return Network(processor, (Task("all", {"gpu": whole}),), ())
    end = COPY_OUT_US + 2 * SMALL_LAYER_US
    tasks = (
        Task("copy in", {"gpu": COPY_IN_US}),
        Task("layers", {processor: whole - COPY_IN_US - end}),
        Task("copy out, pool, flatten", {"gpu": end}),
    )
    names = [task.name for task in tasks]
    flows = tuple(Flow(f"f{i}", names[i], (names[i + 1],)) for i in range(2))
    return Network(processor, tasks, flows)


@pytest.mark.parametrize(
    ("together", "measured_qps"),
    [
        (("gpu",), 981),
        (("dla0",), 779),
        (("gpu", "dla0"), 1070),
        (("dla0", "dla1"), 1352),
        (("gpu", "dla0", "dla1"), 1197),
    ],
)
def test_measured_concurrency_on_orin_follows_from_queueing_behind_the_gpu(together, measured_qps):
    nets = tuple(resnet(processor) for processor in together)
    placement = {net.name: {t.name: next(iter(t.time_us)) for t in net.tasks} for net in nets}
    traffic = [Traffic("gpu", in_flight=IN_FLIGHT)] if "gpu" in together else []
    problem = Problem(nets, THREE, crossing_on=None)
    report = simulate(problem, placement, traffic, duration_us=1e6, warmup_us=1e5)
    total = sum(network.throughput_hz for network in report.networks)
    assert total == pytest.approx(measured_qps, rel=0.2)
    if together == ("gpu", "dla0"):
        assert report.of("dla0").mean_us == pytest.approx(4750, rel=0.2)  # 1284 alone


def test_measured_concurrency_on_xavier_follows_from_the_shared_memory():
    """Two GoogLeNets, FP16: 1.96 and 3.66 ms alone, 3.30 on the GPU and 4.68 on the DLA together.

    The times of groups and their demands on memory are those of HaX-CoNN, times scaled to the whole
    network alone; slowdowns are PCCS's lines (`XAVIER`). Both run back to back.
    """
    groups = haxconn()[0][0]
    alone_us = {"gpu": 1959.13, "dla0": 3656.4}
    nets = []
    for processor, whole in alone_us.items():
        scale = whole / sum(task.time_us[processor] for task in groups.tasks)
        tasks = tuple(
            replace(task, time_us={processor: task.time_us[processor] * scale})
            for task in groups.tasks
        )
        nets.append(Network(processor, tasks, groups.flows))
    placement = {net.name: {t.name: net.name for t in net.tasks} for net in nets}
    problem = Problem(tuple(nets), TWO, contention=XAVIER)
    report = simulate(problem, placement, duration_us=1e6, warmup_us=1e5)
    assert report.of("gpu").mean_us == pytest.approx(3303, rel=0.2)
    assert report.of("dla0").mean_us == pytest.approx(4680, rel=0.2)
    quiet = simulate(replace(problem, contention=None), placement, duration_us=1e5)
    assert quiet.of("gpu").mean_us == pytest.approx(alone_us["gpu"])
