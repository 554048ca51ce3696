"""What one GPU generation adds to the lowering; `toolkit.gpu.generations` finds it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.schedule import MmaWarps, Schedule, no_mma_layout
from toolkit.gpu.ir.launch import TunableOp
from toolkit.gpu.ir.patterns import Rule
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.target import GpuTarget


@dataclass(frozen=True, slots=True)
class Generation:
    """A row for one GPU generation; nothing of it is used where `applies` is false.

    `early_rules` run before `passes.space_to_depth`, `stem_rules` with it; both are left out of
    FP32 builds. `emitters` and `epilogues` are for operations that these rules make: as in
    `toolkit.gpu.operations`. `preferred` schedules come before the generic one, `alternatives`
    after it. `fuse` joins operations that one kernel can compute.
    """

    applies: Callable[[GpuTarget], bool]
    early_rules: tuple[Rule, ...]
    stem_rules: tuple[Rule, ...]
    emitters: Mapping[str, Callable[[LoweringContext, Group], None]]
    epilogues: Mapping[str, int]
    preferred: tuple[Schedule, ...]
    alternatives: tuple[Schedule, ...]
    mma_warps: MmaWarps
    fuse: Callable[[LoweringContext, Sequence[TunableOp]], tuple[TunableOp, ...]]


NO_GENERATION = Generation(
    applies=lambda _: True,
    early_rules=(),
    stem_rules=(),
    emitters={},
    epilogues={},
    preferred=(),
    alternatives=(),
    mma_warps=no_mma_layout,
    fuse=lambda _, ops: tuple(ops),
)
