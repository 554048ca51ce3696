"""Small random placement problems, and their figures found by trying everything."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from toolkit.partition.solver.problem import Flow, Limits, Network, Problem, Task

TWO = ("gpu", "dla0")
THREE = ("gpu", "dla0", "dla1")
Placement = dict[str, str]


def random_network(
    rng: np.random.Generator, tasks: int, processors: tuple[str, ...], name: str = "net"
) -> Network:
    """A connected graph with forks, joins, an input, an output and tasks that the DLA refuses."""
    names = [f"{name}{i}" for i in range(tasks)]
    made, flows = [], [Flow("input", None, (names[0],), 4, *prices(rng))]
    readers: dict[str, list[str]] = {task: [] for task in names}
    for index, task in enumerate(names):
        allowed = ("gpu",) if rng.random() < 0.2 else processors
        time = {"gpu": float(rng.integers(1, 30)), "dla": float(rng.integers(1, 30))}
        energy = {"gpu": float(rng.integers(1, 30)), "dla": float(rng.integers(1, 15))}
        made.append(
            Task(
                task,
                {p: time[p[:3]] for p in allowed},
                {p: energy[p[:3]] for p in allowed},
                weight_bytes=int(rng.integers(1, 10)),
            )
        )
        if index:
            for parent in rng.choice(
                index, size=min(index, int(rng.integers(1, 3))), replace=False
            ):
                readers[names[int(parent)]].append(task)
    for task in names:
        flow = Flow(f"of {task}", task, tuple(readers[task]), 4, *prices(rng), not readers[task])
        flows.append(flow)
    return Network(name, tuple(made), tuple(flows))


def prices(rng: np.random.Generator) -> tuple[dict[str, float], dict[str, float]]:
    """What one tensor costs to cross, in us and mJ."""
    both = [
        {d: float(rng.integers(0, 8)) for d in ("to_dla", "to_gpu", "between_dlas")}
        for _ in range(2)
    ]
    return both[0], both[1]


def all_placements(problem: Problem) -> Iterator[dict[str, Placement]]:
    """Every placement of every network."""
    keys = [(net.name, task.name) for net in problem.networks for task in net.tasks]
    options = [
        [p for p in problem.processors if p in task.time_us]
        for net in problem.networks
        for task in net.tasks
    ]
    for choice in itertools.product(*options):
        placement: dict[str, Placement] = {net.name: {} for net in problem.networks}
        for (network, task), processor in zip(keys, choice, strict=True):
            placement[network][task] = processor
        yield placement


def fewest_segments(
    problem: Problem, net: Network, placement_of: Placement
) -> tuple[float, dict[str, int]]:
    """The cheapest starts, and how many on each processor, over all orders of single tasks."""
    needs = {task.name: set() for task in net.tasks}
    for flow in net.flows:
        for target in flow.targets if flow.source else ():
            needs[target].add(flow.source)
    start = {p: problem.segment_us.get(p, 0.0) for p in problem.processors}
    best: dict[tuple[frozenset[str], str], tuple[Any, ...]] = {(frozenset(), ""): (0.0, 0, ())}
    for _ in net.tasks:
        longer: dict[tuple[frozenset[str], str], tuple[Any, ...]] = {}
        for (done, last), (cost, count, runs) in best.items():
            for task in needs.keys() - done:
                if needs[task] <= done:
                    processor = placement_of[task]
                    new = processor != last
                    entry = (
                        cost + new * start[processor],
                        count + new,
                        (*runs, processor)[: len(runs) + new],
                    )
                    key = (done | {task}, processor)
                    longer[key] = min(longer.get(key, entry), entry)
        best = longer
    cost, _, runs = min(best.values())
    return cost, {p: runs.count(p) for p in problem.processors}


def figures(problem: Problem, net: Network, placement_of: Placement) -> dict[str, Any]:
    """What a placement of one network costs, straight from the definitions."""
    starts, segments = fewest_segments(problem, net, placement_of)
    load = {p: segments[p] * problem.segment_us.get(p, 0.0) for p in problem.processors}
    energy = sum(segments[p] * problem.segment_mj.get(p, 0.0) for p in problem.processors)
    for task in net.tasks:
        load[placement_of[task.name]] += task.time_us[placement_of[task.name]]
        energy += task.energy_mj[placement_of[task.name]]
    crossings, wait = 0, 0.0
    for flow in net.flows:
        at = placement_of[flow.source] if flow.source else "gpu"
        seen = {placement_of[t] for t in flow.targets} | ({"gpu"} if flow.output else set())
        directions = {
            "to_gpu" if there == "gpu" else "to_dla" if at == "gpu" else "between_dlas"
            for there in seen - {at}
        }
        crossings += len(directions)
        wait += sum(flow.crossing_us[direction] for direction in directions)
        energy += sum(flow.crossing_mj[direction] for direction in directions)
    latency = sum(load.values()) + wait
    if problem.crossing_on:
        load[problem.crossing_on] += wait
    return {
        "latency": latency,
        "load": load,
        "energy": energy,
        "crossings": crossings,
        "segments": segments,
        "starts": starts,
    }


def haxconn() -> tuple[tuple[Network, ...], dict[str, float]]:
    """GoogLeNet and AlexNet as HaX-CoNN publishes them, and published makespans; see the file."""
    data = msgspec.toml.decode((Path(__file__).parent / "data" / "haxconn.toml").read_bytes())
    networks = []
    for entry in data["networks"]:
        groups = range(len(entry["gpu_ms"]))
        tasks = tuple(
            Task(
                f"group{i}",
                {"gpu": 1e3 * entry["gpu_ms"][i], "dla0": 1e3 * entry["dla_ms"][i]},
                memory_gbps={"gpu": entry["gpu_gbps"][i], "dla0": entry["dla_gbps"][i]},
            )
            for i in groups
        )
        flows = tuple(
            Flow(
                f"after{i}",
                f"group{i}",
                (f"group{i + 1}",),
                crossing_us={
                    "to_dla": 1e3 * entry["after_gpu_ms"][i],
                    "to_gpu": 1e3 * entry["after_dla_ms"][i],
                },
            )
            for i in groups[:-1]
        )
        networks.append(Network(entry["name"], tasks, flows))
    return tuple(networks), data["published"]


def shortest_order(jobs: tuple[tuple[tuple[str, float, float], ...], ...]) -> float:
    """The least makespan of networks of (processor, time, wait before) over all orders of jobs."""
    best = float("inf")
    stack = [((0,) * len(jobs), (0.0,) * len(jobs), ())]
    seen = set()
    while stack:
        state = stack.pop()
        if state in seen:
            continue
        seen.add(state)
        done, free, busy = state
        if all(count == len(row) for count, row in zip(done, jobs, strict=True)):
            best = min(best, max(free))
            continue
        for index, row in enumerate(jobs):
            if done[index] == len(row):
                continue
            processor, time, wait = row[done[index]]
            start = max(free[index] + wait, dict(busy).get(processor, 0.0))
            end = round(start + time, 9)
            if end < best:
                after = tuple(sorted({**dict(busy), processor: end}.items()))
                stack.append((_at(done, index, done[index] + 1), _at(free, index, end), after))
    return best


def _at(row: tuple, index: int, value: float) -> tuple:
    return (*row[:index], value, *row[index + 1 :])


def problem_of(rng: np.random.Generator, *networks: Network, **fields: Any) -> Problem:
    """A problem with random costs of starting segments."""
    processors = fields.pop("processors", TWO)
    start_us = {"gpu": float(rng.integers(0, 4)), "dla": float(rng.integers(0, 12))}
    start_mj = {"gpu": float(rng.integers(0, 4)), "dla": float(rng.integers(0, 12))}
    return Problem(
        networks,
        processors,
        segment_us={p: start_us[p[:3]] for p in processors},
        segment_mj={p: start_mj[p[:3]] for p in processors},
        crossing_on="gpu" if rng.random() < 0.5 else None,
        limits=fields.pop("limits", Limits()),
        **fields,
    )
