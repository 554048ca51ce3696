"""Two networks with a DLA core for each: the makespan against a program that has every switch."""

from dataclasses import replace

import numpy as np
import pytest
from schedule_fixtures import check_schedule
from scheduling_problems import THREE, random_network

from device.profile import load_profile
from scripts.networks import NETWORKS
from toolkit.graph.passes import run_passes
from toolkit.partition.planning.plan import Model, PlanOptions, plan_together
from toolkit.partition.solver.jobs import schedule_of
from toolkit.partition.solver.milp_makespan import solve_slots
from toolkit.partition.solver.pair_search import search_pair
from toolkit.partition.solver.problem import Flow, Limits, Network, Problem, Task
from toolkit.partition.solver.solve import solve

ANY = float("inf")


def random_pair(rng: np.random.Generator, most: int = 4) -> Problem:
    networks = tuple(random_network(rng, int(rng.integers(1, most + 1)), THREE, n) for n in "ab")
    start = float(rng.integers(0, 12))
    return Problem(networks, THREE, segment_us={"gpu": 0.0, "dla0": start, "dla1": start})


def test_no_order_of_any_number_of_switches_ends_earlier(rng):
    """The program has a slot for each task, and knows nothing of cores of one's own."""
    for _ in range(6):
        problem = random_pair(rng, 3)
        order = search_pair(problem, 5.0, ANY)
        assert order is not None
        assert order.exact
        value = schedule_of(order.jobs)[1]
        tasks = max(len(network.tasks) for network in problem.networks)
        outcome = solve_slots(problem, tasks - 1, 20.0, [job.segment for job in order.jobs])
        assert value == pytest.approx(outcome.bound, rel=1e-5)


def test_its_bound_holds_however_short_the_search(rng):
    for _ in range(6):
        problem = random_pair(rng, 9)
        hurried, whole = search_pair(problem, 1e-4, ANY), search_pair(problem, 20.0, ANY)
        assert hurried is not None
        assert whole is not None
        assert hurried.bound <= whole.bound * (1 + 1e-9)
        assert whole.exact
        assert schedule_of(whole.jobs)[1] == pytest.approx(whole.bound)
        if hurried.jobs:
            assert schedule_of(hurried.jobs)[1] >= whole.bound * (1 - 1e-9)


def test_its_bound_is_of_whole_ways_not_of_mixes_of_them():
    """Each on the GPU for 2 us or on its core for 4: no order ends before 4, half of each at 3."""
    task = Task("t", {"gpu": 2.0, "dla0": 4.0, "dla1": 4.0})
    order = search_pair(
        Problem((Network("a", (task,), ()), Network("b", (task,), ())), THREE), 0, ANY
    )
    assert order is not None
    assert order.bound == 4.0


def test_fewer_ways_are_a_bound_too(rng, monkeypatch):
    problem = random_pair(rng, 9)
    whole = search_pair(problem, 20.0, ANY)
    monkeypatch.setattr("toolkit.partition.solver.steps.MOST_WAYS", 2)
    rough, unsearched = search_pair(problem, 20.0, ANY), search_pair(problem, 0, ANY)
    assert whole is not None
    assert rough is not None
    assert unsearched is not None
    assert rough.exact
    assert rough.bound == pytest.approx(whole.bound)
    assert unsearched.bound <= whole.bound * (1 + 1e-9)


def test_the_solution_is_a_schedule_that_the_problem_allows(rng):
    for _ in range(4):
        problem = random_pair(rng, 9)
        solution = solve(problem, "makespan", seconds=10)
        assert solution.proven
        check_schedule(problem, solution)
        for network in problem.networks:
            assert {task.name for task in network.tasks} == set(solution.placement[network.name])


def test_a_tensor_crosses_while_its_network_waits_for_the_gpu():
    """`late` reads on the DLA what waits in GPU memory; `soon` waits for the other network."""
    tasks = (
        Task("first", {"gpu": 1.0}),
        Task("soon", {"gpu": 1.0}),
        Task("late", {"dla0": 5.0, "dla1": 5.0}),
    )
    flows = (
        Flow("shared", "first", ("soon", "late"), crossing_us={"to_dla": 4.0}),
        Flow("order", "soon", ("late",)),
    )
    second = Network("b", (Task("long", {"gpu": 10.0}),), ())
    problem = Problem((Network("a", tasks, flows), second), THREE)
    order = search_pair(problem, 1.0, ANY)
    assert order is not None
    # Without waiting: 1 + 1 + 4 + 5. The other runs meanwhile, so it ends at 12.
    assert schedule_of(order.jobs)[1] == pytest.approx(12.0)
    busy = replace(
        problem,
        networks=(
            problem.networks[0],
            replace(
                second,
                tasks=(
                    Task("begin", {"dla0": 1.0, "dla1": 1.0}),
                    Task("long", {"gpu": 10.0}),
                    Task("end", {"dla0": 6.0, "dla1": 6.0}),
                ),
                flows=(Flow("x", "begin", ("long",)), Flow("y", "long", ("end",))),
            ),
        ),
    )
    order = search_pair(busy, 1.0, ANY)
    assert order is not None
    # The other has no time to lose: 1, 10 and 6 us. `soon` waits for it, and the tensor crosses.
    assert schedule_of(order.jobs)[1] == pytest.approx(17.0)


def test_other_kinds_of_problems_are_left_to_other_searches(rng):
    problem = random_pair(rng)
    assert search_pair(replace(problem, limits=Limits(max_switches=1)), 1.0, ANY) is None
    assert search_pair(replace(problem, networks=problem.networks[:1]), 1.0, ANY) is None
    dear = {**problem.segment_us, "gpu": 1.0}
    assert search_pair(replace(problem, segment_us=dear), 1.0, ANY) is None


def test_too_many_loadables_leave_a_bound():
    tasks = tuple(
        Task(f"t{i}", {"gpu": 1.0} if i % 2 else {"gpu": 90.0, "dla0": 1.0, "dla1": 1.0})
        for i in range(5)
    )
    flows = tuple(Flow(f"f{i}", f"t{i}", (f"t{i + 1}",)) for i in range(4))
    problem = Problem((Network("a", tasks, flows), Network("b", tasks, flows)), THREE)
    free = search_pair(problem, 5.0, ANY)
    limited = replace(problem, limits=Limits(max_loadables=1))
    order = search_pair(limited, 5.0, ANY)
    assert free is not None
    assert order is not None
    assert not order.jobs
    assert not order.exact
    assert order.bound == pytest.approx(schedule_of(free.jobs)[1])
    solution = solve(limited, "makespan", seconds=2)
    assert solution.value > free.bound
    assert solution.bound <= solution.value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "profile", "tensorrt", "precision", "least_us"),
    [
        (("vgg19", "resnet152"), "agx-xavier-32gb", "8.5.2", "fp16", 9676.4),
        (("googlenet", "alexnet"), "agx-xavier-32gb", "8.5.2", "fp16", 2117.5),
        (("vgg19", "resnet152"), "agx-orin-64gb", "8.6.2", "int8", 2245.4),
        (("googlenet", "alexnet"), "agx-orin-64gb", "8.6.2", "int8", 768.8),
    ],
)
def test_two_models_without_a_limit_of_switches_are_proven(
    pair, profile, tensorrt, precision, least_us
):
    models = [Model(name, run_passes(NETWORKS[name].model())[0].graph) for name in pair]
    options = PlanOptions(precision, tensorrt, "makespan", seconds=0.1)
    problem = plan_together(models, load_profile(profile), options).placed.problem
    solution = solve(problem, "makespan", seconds=20)
    assert solution.proven
    assert solution.value == pytest.approx(least_us, rel=1e-3)
    check_schedule(problem, solution)
