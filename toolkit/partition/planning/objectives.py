"""Objectives of a plan, one row each, named as on the command line."""

from collections.abc import Mapping
from dataclasses import dataclass

from device.choices import list_choices
from toolkit.errors import PlanError
from toolkit.partition.solver.problem import Objective


@dataclass(frozen=True, slots=True)
class Goal:
    """`aim` is the solver's objective; `per_frame` and `at_rates` say what its value is.

    `frames_in_flight`: frames of one network follow each other closely, and where there are two DLA
    cores every loadable is on both, and frames take turns.
    """

    aim: Objective
    per_frame: tuple[str, str]  # in words, and the unit
    at_rates: tuple[str, str]
    frames_in_flight: bool

    def quantity(self, *, rated: bool, batch: int = 1) -> tuple[str, str]:
        """Return what the value is, in words, and its unit."""
        text, unit = self.at_rates if rated else self.per_frame
        return (text.replace("frame", "batch") if batch > 1 else text), unit


# fmt: off
GOALS: Mapping[str, Goal] = {
    "throughput": Goal(
        "utilisation",
        ("time of the busiest processor per frame", "us"),
        ("busy share of the busiest processor", "of the time"), True),
    "latency": Goal(
        "latency", ("latency of a frame alone", "us"), ("latency of a frame alone", "us"), False),
    "energy": Goal("energy", ("energy of a frame", "mJ"), ("power", "mW"), True),
    "makespan": Goal(
        "makespan", ("time until a frame of each model is done", "us"),
        ("time until a frame of each model is done", "us"), False),
    "gpu-relief": Goal(
        "gpu_time", ("GPU time of a frame", "us"), ("busy share of the GPU", "of the time"), False),
}
# fmt: on
DEFAULT = "throughput"
MAKESPAN = "makespan"  # of several models
BUILD_GOALS = tuple(name for name in GOALS if name != MAKESPAN)


def goal_named(name: str) -> Goal:
    """Return a row of GOALS.

    Raises PlanError: there is none of that name.
    """
    if name not in GOALS:
        raise PlanError(f"there is no objective {name!r}: take one of {list_choices(name, GOALS)}")
    return GOALS[name]
