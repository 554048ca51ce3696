"""Options of a plan. A calibration reads them, too, so nothing that plans is imported here."""

from dataclasses import dataclass, field

from device.engine.manifest import Precision
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.objectives import DEFAULT

SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of a plan beside the model and the profile.

    `objective`: a row of `toolkit.partition.planning.objectives.GOALS`. `power_mode` None: the
    highest clocks. `max_crossings`: tensors that may pass between processors. `seconds` bound the
    search. `forced`: nodes that the user places. `rewrites` False: the graph is planned as it is,
    without those that move nodes onto the DLA. `min_gain`: the least share of its cost that a
    move to the DLA must gain, None: half the spread of the model's errors
    (`toolkit/partition/planning/margin.py`). `max_latency_ms`: choose the batch for throughput
    within it (`toolkit/engine/batch.py`). `bfloat16`: GPU kernels store BF16 where the precision
    is FP16, whose costs it has.
    """

    precision: Precision = "int8"
    tensorrt: str | None = None
    objective: str = DEFAULT
    power_mode: str | None = None
    max_crossings: int | None = None
    seconds: float = SECONDS
    forced: Forced = field(default_factory=Forced)
    min_gain: float | None = None
    max_latency_ms: float | None = None
    rewrites: bool = True
    bfloat16: bool = False
