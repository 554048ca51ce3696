"""Segments of a placement: valid, and the fewest there can be."""

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, cycle, pairwise
from types import FrameType

import numpy as np
import pytest
from scheduling_problems import THREE, TWO, fewest_segments, problem_of, random_network

from toolkit.partition.solver.assess import assess, bad_components
from toolkit.partition.solver.problem import Flow, Network, Problem, Task
from toolkit.partition.solver.segmentation import components, segments_of
from toolkit.partition.solver.solve import solve


def random_case(rng: np.random.Generator, processors: tuple[str, ...]):
    net = random_network(rng, int(rng.integers(1, 9)), processors)
    return net, {task.name: str(rng.choice(list(task.time_us))) for task in net.tasks}


@pytest.mark.parametrize("processors", [TWO, THREE])
def test_segments_hold_every_task_once_on_its_processor_after_what_it_reads(processors, rng):
    for _ in range(30):
        net, placement = random_case(rng, processors)
        segments = segments_of(net, placement, {})
        order = [task for segment in segments for task in segment.tasks]
        assert sorted(order) == sorted(placement)
        assert all(placement[task] == s.processor for s in segments for task in s.tasks)
        position = {task: index for index, task in enumerate(order)}
        for flow in net.flows:
            assert all(
                flow.source is None or position[flow.source] < position[t] for t in flow.targets
            )


@pytest.mark.parametrize("processors", [TWO, THREE])
def test_no_order_of_tasks_has_fewer_segments(processors, rng):
    for _ in range(30):
        net, placement = random_case(rng, processors)
        actual = len(segments_of(net, placement, {}))
        _, counts = fewest_segments(problem_of(rng, net, processors=processors), net, placement)
        assert actual == sum(counts.values())


def test_dla_tasks_of_different_batches_are_apart(rng):
    net, _ = random_case(rng, TWO)
    net = replace(net, tasks=tuple(replace(task, lane=task.name) for task in net.tasks))
    placement = dict.fromkeys((task.name for task in net.tasks), "dla0")
    assert len(segments_of(net, placement, {})) == len(net.tasks)
    assert len(segments_of(net, dict.fromkeys(placement, "gpu"), {})) == 1


def test_pieces_are_connected_and_whole(rng):
    for _ in range(20):
        net, placement = random_case(rng, TWO)
        graph, row = net.graph, [placement[task.name] for task in net.tasks]
        actual = components(graph, row, "dla0")
        owner = {task: number for number, piece in enumerate(actual) for task in piece}
        assert sorted(owner) == [i for i, processor in enumerate(row) if processor == "dla0"]
        for parent, child in graph.arcs:
            if parent in owner and child in owner:
                assert owner[parent] == owner[child]
        assert len(set(owner.values())) == len(actual)


def _calls(function: Callable[[], object]) -> int:
    """Return the calls of Python that a function takes."""
    count = 0

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def _turns(tasks: int, batches: int = 1) -> tuple[Problem, dict[str, str]]:
    """A chain whose tasks take turns on both processors; those of the DLA have several batches."""
    names = [f"t{number}" for number in range(tasks)]
    network = Network(
        "chain",
        tuple(
            Task(name, {"gpu": 2.0, "dla0": 1.0}, lane=str(number // 2 % batches))
            for number, name in enumerate(names)
        ),
        tuple(Flow(a, a, (b,), bytes=4) for a, b in pairwise(names)),
    )
    assert len(network.graph.parents) == tasks  # found once
    placement = dict(zip(names, cycle(("gpu", "dla0")), strict=False))
    return Problem((network,), ("gpu", "dla0")), placement


def _calls_of_assessment(tasks: int, batches: int) -> int:
    problem, placement = _turns(tasks, batches)
    (network,) = problem.networks

    def assess_all() -> None:
        assert len(assess(problem, network, placement).segments) == tasks
        assert not list(bad_components(problem, network, placement))

    return _calls(assess_all)


@pytest.mark.parametrize("batches", [1, 2])
def test_twice_the_tasks_take_about_twice_the_calls(batches: int) -> None:
    assert _calls_of_assessment(400, batches) <= 2.3 * _calls_of_assessment(200, batches)


def _calls_of_search(tasks: int) -> int:
    """Of one that ends at its bound: no crossing pays, whatever the islands are."""
    network = _turns(tasks)[0].networks[0]
    flows = tuple(replace(f, crossing_us={"to_dla": 9.0, "to_gpu": 9.0}) for f in network.flows)
    alone = [replace(t, time_us={"gpu": 2.0}) for t in network.tasks[::2]]
    rows = tuple(chain.from_iterable(zip(alone, network.tasks[1::2], strict=True)))
    problem = Problem((replace(network, tasks=rows, flows=flows),), ("gpu", "dla0"))
    value = 2.0 * tasks
    return _calls(lambda: solve(problem, "latency", below=0.9 * value))


def test_a_search_that_its_bound_ends_tries_no_island_by_itself() -> None:
    _calls_of_search(2)  # imports
    assert _calls_of_search(80) <= 2.3 * _calls_of_search(40)
