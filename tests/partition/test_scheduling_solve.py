"""The solver against trying everything, against what needs no solver, and against itself."""

from dataclasses import replace

import pytest
from scheduling_problems import (
    THREE,
    TWO,
    all_placements,
    figures,
    problem_of,
    random_network,
)

from toolkit.errors import PlanError
from toolkit.partition.solver.assess import assess, utilisation, value_of, violations
from toolkit.partition.solver.baselines import costs_of, dla_with_fallback, gpu_only, greedy
from toolkit.partition.solver.milp import Program
from toolkit.partition.solver.problem import Flow, Limits, Network, Problem, Task
from toolkit.partition.solver.solve import solve

OBJECTIVES = ("latency", "utilisation", "energy", "gpu_time")


def value(problem, objective, figs):
    """The objective from the figures of all networks; None if a rate is too high."""
    rated = all(net.rate_hz for net in problem.networks)
    weight = {net.name: net.rate_hz or 1.0 for net in problem.networks}
    scale = 1e-6 if rated else 1.0
    busy = {
        p: sum(weight[n] * scale * f["load"][p] for n, f in figs.items())
        for p in problem.processors
    }
    if rated and objective != "utilisation" and max(busy.values()) > problem.utilisation_limit:
        return None
    return {
        "latency": sum(f["latency"] for f in figs.values()),
        "utilisation": max(busy.values()),
        "energy": sum(weight[n] * f["energy"] for n, f in figs.items()),
        "gpu_time": busy["gpu"],
    }[objective]


def least(problem, objective, keeps=lambda placement, figs: True):
    """The best value over all placements, None if none keeps the limits."""
    best = None
    for placement in all_placements(problem):
        figs = {n.name: figures(problem, n, placement[n.name]) for n in problem.networks}
        actual = value(problem, objective, figs)
        if actual is not None and keeps(placement, figs):
            best = actual if best is None else min(best, actual)
    return best


@pytest.mark.parametrize("processors", [TWO, THREE])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_placement_is_better_than_the_one_found(objective, processors, rng):
    for _ in range(8):
        size = int(rng.integers(1, 7 if processors == TWO else 5))
        problem = problem_of(rng, random_network(rng, size, processors), processors=processors)
        solution = solve(problem, objective)
        assert solution.proven
        assert solution.value == pytest.approx(least(problem, objective), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("processors", [TWO, THREE])
def test_assessed_figures_follow_from_the_definitions(processors, rng):
    for _ in range(15):
        net = random_network(rng, int(rng.integers(1, 7)), processors)
        problem = problem_of(rng, net, processors=processors)
        placement = {t.name: str(rng.choice(list(t.time_us))) for t in net.tasks}
        cost, want = assess(problem, net, placement), figures(problem, net, placement)
        assert cost.latency_us == pytest.approx(want["latency"])
        assert cost.energy_mj == pytest.approx(want["energy"])
        assert len(cost.crossings) == want["crossings"]
        starts = sum(problem.segment_us[s.processor] for s in cost.segments)
        assert starts == pytest.approx(want["starts"])
        assert len(cost.segments) == sum(want["segments"].values())


def test_a_search_for_what_is_not_possible_ends_at_its_start(rng):
    net = random_network(rng, 8, TWO)
    problem = problem_of(rng, net)
    best = solve(problem, "utilisation")
    below = solve(problem, "utilisation", starts=[best.placement], below=0.99 * best.value)
    assert below.value == pytest.approx(best.value)
    assert below.bound >= 0.99 * best.value - 1e-9
    above = solve(problem, "utilisation", below=1.01 * best.value)
    assert above.value == pytest.approx(best.value)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_known_bound_ends_the_search_at_its_placement(objective, rng, monkeypatch):
    problem = problem_of(rng, random_network(rng, 8, TWO))
    best = solve(problem, objective)
    for search in ("relaxed", "minimise"):
        monkeypatch.setattr(Program, search, lambda *_, **__: pytest.fail("searched again"))
    again = solve(problem, objective, starts=[best.placement], bound=best.bound)
    assert (again.placement, again.value) == (best.placement, best.value)
    assert again.proven


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_start_near_the_relaxation_is_improved_to_the_optimum(objective, rng, monkeypatch):
    monkeypatch.setattr("toolkit.partition.solver.solve._NEAR", 1e3)  # any start is
    for _ in range(4):
        problem = problem_of(rng, random_network(rng, 7, TWO))
        solution = solve(problem, objective, gap=0.2)
        assert solution.proven
        assert solution.value == pytest.approx(least(problem, objective), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_rates_of_a_workload_are_met_as_well_as_can_be(objective, rng):
    solved = 0
    for _ in range(8):
        networks = [
            replace(random_network(rng, 3, TWO, name), rate_hz=float(rng.integers(2000, 20000)))
            for name in ("one", "two")
        ]
        problem = problem_of(rng, *networks)
        best = least(problem, objective)
        if best is None:
            with pytest.raises(PlanError, match=r"busy [\d.]+ of the time"):
                solve(problem, objective)
            continue
        solved += 1
        solution = solve(problem, objective)
        assert solution.proven
        assert solution.value == pytest.approx(best, rel=1e-6)
    assert solved


@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_switches_and_crossings_keep_to_their_limits(most, rng):
    for _ in range(5):
        net = random_network(rng, 5, TWO)
        for limits, count in (
            (Limits(max_switches=most), lambda f: sum(f["segments"].values()) - 1),
            (Limits(max_crossings=most), lambda f: f["crossings"]),
        ):
            problem = problem_of(rng, net, limits=limits)
            problem = replace(problem, segment_us={"gpu": 1.0, "dla0": 2.0})
            best = least(problem, "latency", lambda _, f, count=count: count(f["net"]) <= most)
            if best is None:
                with pytest.raises(PlanError, match="relax"):
                    solve(problem, "latency")
            else:
                assert solve(problem, "latency").value == pytest.approx(best)


def chain(times, **fields):
    """A chain of tasks with times (GPU, DLA) and crossings that cost 1 us."""
    tasks = tuple(
        Task(f"t{i}", {"gpu": float(gpu), "dla0": float(dla)}, **fields)
        for i, (gpu, dla) in enumerate(times)
    )
    price = {"to_dla": 1.0, "to_gpu": 1.0}
    flows = tuple(Flow(f"f{i}", f"t{i}", (f"t{i + 1}",), 100, price) for i in range(len(tasks) - 1))
    return Network("chain", tasks, flows)


def pieces_of(solution, processor="dla0"):
    return [s.tasks for s in solution.segments if s.processor == processor]


def test_a_piece_below_the_least_time_stays_on_the_gpu():
    net = chain([(9, 1), (1, 30), (9, 4), (9, 4), (1, 9)])
    free = solve(Problem((net,), TWO), "latency")
    assert pieces_of(free) == [("t0",), ("t2", "t3")]
    limited = replace(free_limits := Problem((net,), TWO), limits=Limits(min_segment_us=5.0))
    assert pieces_of(solve(limited, "latency")) == [("t2", "t3")]
    assert solve(limited, "latency").value > solve(free_limits, "latency").value


def test_a_loadable_that_would_be_too_heavy_is_broken_where_it_costs_least():
    net = chain([(9, 1), (3, 1), (9, 1)], weight_bytes=10)
    problem = Problem((net,), TWO, limits=Limits(weight_bytes=30))
    assert pieces_of(solve(problem, "latency")) == [("t0",), ("t2",)]
    just_below = replace(problem, limits=Limits(weight_bytes=31))
    assert pieces_of(solve(just_below, "latency")) == [("t0", "t1", "t2")]


def test_intermediates_of_a_loadable_stay_below_their_limit():
    net = chain([(9, 1), (9, 1), (9, 2)])
    problem = Problem((net,), TWO, limits=Limits(intermediate_bytes=200))
    solution = solve(problem, "latency")
    assert solution.proven
    assert not violations(problem, solution.placement, costs_of(problem, solution.placement))
    assert sum(map(len, pieces_of(solution))) == 2


def test_loadables_of_all_networks_share_a_core():
    net = chain([(9, 1), (1, 9), (9, 1)])
    pair = (replace(net, name="one"), replace(net, name="two"))
    for most in range(5):
        problem = Problem(pair, TWO, limits=Limits(max_loadables=most))
        solution = solve(problem, "latency")
        assert len(pieces_of(solution)) == most


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_relaxing_a_limit_never_makes_it_worse(objective, rng):
    problem = problem_of(rng, random_network(rng, 14, TWO))
    problem = replace(problem, segment_us={"gpu": 1.0, "dla0": 3.0})
    values = [
        solve(replace(problem, limits=Limits(max_switches=most)), objective).value
        for most in (1, 2, 3, 4, None)
    ]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_never_worse_than_what_needs_no_solver(objective, rng):
    for processors in (TWO, THREE):
        net = random_network(rng, 30 if processors == TWO else 12, processors)
        problem = problem_of(rng, net, processors=processors)
        actual = solve(problem, objective, seconds=10).value
        for placement in (
            gpu_only(problem),
            dla_with_fallback(problem),
            greedy(problem, objective),
        ):
            assert actual <= value_of(problem, objective, costs_of(problem, placement)) + 1e-9


def test_the_bound_holds_when_time_runs_out(rng):
    problem = problem_of(rng, random_network(rng, 16, THREE), processors=THREE)
    hurried, patient = (solve(problem, "utilisation", seconds=s) for s in (0.02, 20))
    assert hurried.bound <= patient.value + 1e-6
    assert hurried.value >= patient.bound - 1e-6
    assert 0 <= hurried.gap <= 1


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_same_problem_gives_the_same_solution(objective, rng):
    problem = problem_of(rng, random_network(rng, 20, TWO))
    first, second = (solve(problem, objective) for _ in range(2))
    assert first.placement == second.placement
    assert first.segments == second.segments


def test_tasks_that_take_no_time_change_nothing_but_the_size(rng):
    for _ in range(5):
        net = random_network(rng, 6, TWO)
        problem = problem_of(rng, net)
        price = {"to_dla": 7.0, "to_gpu": 7.0}
        shape = Task("shape", dict.fromkeys(TWO, 0.0), dict.fromkeys(TWO, 0.0))
        last = net.flows[-1]
        longer = replace(
            net,
            tasks=(*net.tasks, shape),
            flows=(
                *net.flows[:-1],
                replace(last, targets=("shape",), output=False, crossing_us=price),
                Flow("end", "shape", (), 4, last.crossing_us, last.crossing_mj, output=True),
            ),
        )
        for objective in OBJECTIVES:
            one = solve(problem, objective).value
            second = solve(replace(problem, networks=(longer,)), objective).value
            assert second == pytest.approx(one)


def test_alternating_cores_share_the_load_of_the_dla():
    net = chain([(100, 10)] * 4)
    problem = Problem((net,), TWO, alternate_dlas=True)
    solution = solve(problem, "utilisation")
    assert solution.value == pytest.approx(20.0)
    assert utilisation(problem, costs_of(problem, solution.placement))["dla0"] == 20.0


def test_problems_that_do_not_fit_together_are_refused():
    task = Task("a", {"gpu": 1.0})
    with pytest.raises(PlanError, match="unknown task 'b'"):
        Problem((Network("n", (task,), (Flow("f", "a", ("b",)),)),))
    with pytest.raises(PlanError, match="before it is made"):
        Problem((Network("n", (task,), (Flow("f", "a", ("a",)),)),))
    with pytest.raises(PlanError, match="can run on none"):
        Problem((Network("n", (Task("a", {"dla1": 1.0}),), ()),), TWO)
    with pytest.raises(PlanError, match="different names"):
        Problem((Network("n", (task,), ()), Network("n", (task,), ())))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_search_for_less_ends_with_no_better_answer_only_where_there_is_none(objective, rng):
    for _ in range(6):
        problem = problem_of(rng, random_network(rng, 6, TWO), processors=TWO)
        best = solve(problem, objective).value
        start = gpu_only(problem)
        for below in (best * 0.9, best * 1.1):
            tried = solve(problem, objective, starts=[start], below=below)
            assert (tried.value <= best * (1 + 1e-6)) or below < best
            assert tried.bound <= tried.value * (1 + 1e-9)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_search_ends_at_what_is_enough(objective, rng):
    for _ in range(6):
        problem = problem_of(rng, random_network(rng, 6, TWO), processors=TWO)
        best = solve(problem, objective).value
        easy = solve(problem, objective, enough=1.5 * best)
        assert best * (1 - 1e-6) <= easy.value <= max(1.5 * best, best * (1 + 1e-6))
        assert solve(problem, objective, enough=best / 2).value == pytest.approx(best)


def test_a_start_far_from_the_best_does_not_hide_what_intervals_find():
    """A long chain with one cheap cut, from all on the GPU and with no time for a program."""
    on = {"gpu": 2.0, "dla0": 2.0}
    dear = {"to_dla": 1.0, "to_gpu": 1.0}
    tasks = tuple(Task(f"t{i}", on) for i in range(100))
    flows = tuple(
        Flow(f"f{i}", f"t{i}", (f"t{i + 1}",), crossing_us={} if i == 59 else dear)
        for i in range(99)
    )
    problem = Problem((Network("chain", tasks, flows),), TWO, alternate_dlas=True)
    start = gpu_only(problem)
    assert value_of(problem, "utilisation", costs_of(problem, start)) == 200
    solution = solve(problem, "utilisation", 1e-6, starts=[start], below=180)
    assert solution.value == solve(problem, "utilisation", 1e-6).value
    assert solution.value < 80
