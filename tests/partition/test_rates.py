"""The predicted full rate contradicts no physics: bounds, faster processors, better boards."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pytest
from legalize_graphs import to_ir
from random_networks import Growing
from scheduling_problems import random_network

from device.engine.manifest import Precision
from device.profile import Profile, list_profiles
from toolkit.graph.node_view import views
from toolkit.partition.costs.hardware import Hardware, hardware
from toolkit.partition.costs.model import CostModel
from toolkit.partition.planning.formulate import formulate, problem_of
from toolkit.partition.planning.rates import full_rate
from toolkit.partition.planning.refusals import refusals
from toolkit.partition.solver.assess import assess
from toolkit.partition.solver.problem import Limits, Placement, Problem, Task
from toolkit.partition.solver.simulate import Traffic, simulate

NETWORKS = range(50)


class Shared:
    """A memory of 20 GB/s: the formula of the cost model with other constants."""

    def speed(self, processor: str, own_gbps: float, other_gbps: float) -> float:
        return 1 / (1 + 3 * max(0.0, own_gbps / 20 - 0.2) * min(other_gbps / 20, 0.4))


def case_of(seed: int, contention: bool = True) -> tuple[Problem, Placement]:
    """A random network on a board whose DLA cores take turns, placed at random."""
    rng = np.random.default_rng(seed)
    network = random_network(rng, int(rng.integers(2, 12)), ("gpu", "dla0"))
    tasks = tuple(
        replace(task, memory_gbps={p: float(rng.integers(0, 20)) for p in task.time_us})
        for task in network.tasks
    )
    problem = Problem(
        (replace(network, tasks=tasks),),
        ("gpu", "dla0"),
        alternate_dlas=bool(rng.random() < 0.5),
        contention=Shared() if contention else None,
    )
    homes = {t.name: str(rng.choice(sorted(t.time_us))) for t in tasks}
    return problem, {network.name: homes}


def rate_of(problem: Problem, placement: Placement) -> float:
    return full_rate(problem, problem.networks[0], placement).frames_per_second


def sped_up(task: Task, processor: str, factor: float) -> Task:
    """The same bytes in less time."""
    times, demands = dict(task.time_us), dict(task.memory_gbps)
    if processor in times:
        times[processor] /= factor
        demands[processor] *= factor
    return replace(task, time_us=times, memory_gbps=demands)


@pytest.mark.parametrize("seed", NETWORKS)
def test_the_rate_is_between_the_busiest_processor_and_one_frame_at_a_time(seed: int) -> None:
    problem, placement = case_of(seed)
    (network,) = problem.networks
    cost = assess(problem, network, placement[network.name])
    cores = 2 if problem.alternate_dlas else 1
    busiest_us = max(cost.load_us["gpu"], cost.load_us["dla0"] / cores)
    rate = rate_of(problem, placement)
    assert 1e6 / cost.latency_us * (1 - 1e-9) <= rate <= 1e6 / busiest_us * (1 + 1e-9)
    full = full_rate(problem, network, placement)
    assert full.latency_us >= cost.latency_us
    assert full.frames_per_second * full.latency_us * 1e-6 <= full.in_flight * (1 + 1e-9)


@pytest.mark.parametrize("seed", NETWORKS)
@pytest.mark.parametrize("processor", ["gpu", "dla0"])
def test_a_faster_processor_never_lowers_the_rate(seed: int, processor: str) -> None:
    problem, placement = case_of(seed)
    (network,) = problem.networks
    rates = []
    for factor in (1.0, 1.1, 1.5, 3.0):
        tasks = tuple(sped_up(task, processor, factor) for task in network.tasks)
        faster = replace(problem, networks=(replace(network, tasks=tasks),))
        rates.append(rate_of(faster, placement))
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(rates))


@pytest.mark.parametrize("seed", NETWORKS)
def test_a_second_core_never_lowers_the_rate(seed: int) -> None:
    problem, placement = case_of(seed)
    one, two = (replace(problem, alternate_dlas=cores > 1) for cores in (1, 2))
    assert rate_of(two, placement) >= rate_of(one, placement) * (1 - 1e-9)


def test_queues_reach_the_rate_with_so_many_frames_in_flight() -> None:
    """First come, first served: half of the placements within 1 %, none 25 % below or above it."""
    shares = []
    for seed in NETWORKS:
        problem, placement = case_of(seed, contention=False)
        (network,) = problem.networks
        full = full_rate(problem, network, placement)
        latency_us = assess(problem, network, placement[network.name]).latency_us
        report = simulate(
            problem,
            placement,
            (Traffic(network.name, in_flight=full.in_flight),),
            duration_us=300 * latency_us,
            warmup_us=20 * latency_us,
        )
        shares.append(report.networks[0].throughput_hz / full.frames_per_second)
    assert np.median(shares) > 0.99
    assert min(shares) > 0.75
    assert max(shares) < 1.02


def boards(generation: str) -> Iterator[tuple[Profile, Hardware]]:
    for profile in list_profiles():
        if profile.dla is not None and profile.dla.generation == generation:
            yield profile, hardware(profile)


def at_least(one: Hardware, second: Hardware) -> bool:
    """No clock, number of cores or bandwidth of a board is below those of another."""
    return all(
        getattr(one, name) >= getattr(second, name)
        for name in ("sms", "gpu_mhz", "cuda_rate", "bandwidth", "dla_cores", "dla_mhz")
    ) and all(
        mine >= theirs
        for (_, mine), (_, theirs) in zip(one.matrix_rates, second.matrix_rates, strict=True)
    )


def boards_compared(generation: str, precision: Precision, seeds: Iterable[int]) -> int:
    """Compare each better board with each worse one, of random networks placed alike."""
    rows = list(boards(generation))
    compared = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        nodes = views(to_ir(Growing(rng).net().proto()).graph)
        ends = [tensor.name for tensor in nodes[-1].outputs]
        refused = refusals(nodes, rows[0][0], precision, "8.5.2", has_scale=lambda name: True)
        rates: dict[str, float] = {}
        homes: dict[str, str] = {}
        for profile, board in rows:
            costs = CostModel(nodes, profile, precision=precision)
            network = formulate("m", nodes, refused, costs, ("gpu", "dla0"), outputs=ends).network
            problem = problem_of(
                [network], costs, ("gpu", "dla0"), Limits(), alternate_dlas=board.dla_cores > 1
            )
            homes = homes or {t.name: str(rng.choice(sorted(t.time_us))) for t in network.tasks}
            rates[profile.name] = rate_of(problem, {"m": homes})
        for (better, more), (worse, less) in permutations(rows, 2):
            if at_least(more, less):
                compared += 1
                assert rates[better.name] >= rates[worse.name] * (1 - 1e-9), (
                    f"seed {seed}: {better.name} {rates[better.name]:.1f} frames/s, "
                    f"{worse.name} {rates[worse.name]:.1f}"
                )
    return compared


@pytest.mark.parametrize("generation", ["v1", "v2"])
@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_no_better_board_of_a_generation_is_predicted_slower(generation, precision) -> None:
    assert boards_compared(generation, precision, range(6)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["v1", "v2"])
@pytest.mark.parametrize("precision", ["int8", "fp16"])
def test_no_better_board_is_slower_on_fifty_networks(generation, precision) -> None:
    assert boards_compared(generation, precision, range(100, 150)) > 100
