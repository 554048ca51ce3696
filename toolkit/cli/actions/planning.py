"""The options of a plan as a value of the library, for commands that plan."""

from dataclasses import replace

from toolkit.cli.options.choices import PlanPrecision
from toolkit.cli.options.plan import PlanningOptions
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.plan import PlanOptions


def plan_options(objective: str, limits: PlanningOptions) -> PlanOptions:
    """Return the objective and the limits of a plan."""
    return PlanOptions(
        objective=objective,
        power_mode=limits.power_mode,
        max_crossings=limits.max_crossings,
        forced=Forced(limits.force_dla, limits.force_gpu),
        min_gain=limits.min_gain,
        max_latency_ms=limits.max_latency_ms,
    )


def in_precision(options: PlanOptions, precision: PlanPrecision) -> PlanOptions:
    """Return the options of a plan in a precision; BF16 has the costs of FP16."""
    if precision == "bf16":
        return replace(options, precision="fp16", bfloat16=True)
    return replace(options, precision=precision)
