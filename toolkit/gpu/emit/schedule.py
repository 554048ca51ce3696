"""What a schedule of a matrix product is, and how an emitter gets the tactics of all of them.

A schedule is a row: whether it applies to a `GemmProblem`, and the launches that compute it. The
generic row is `toolkit.gpu.emit.tiled_gemm.TILED`; a GPU generation adds others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.gpu.ir.gemm import GemmProblem
from toolkit.gpu.ir.launch import Tactic, TunableOp
from toolkit.gpu.schedule.tiles import Tile
from toolkit.gpu.target import GpuTarget

if TYPE_CHECKING:  # the context holds schedules
    from toolkit.gpu.emit.context import LoweringContext


@dataclass(frozen=True, slots=True)
class Schedule:
    """One way to compute a matrix product.

    `refusal` says why it does not apply, None where it does. `tactics` are the launches, the best
    first by estimate; there may be none.
    """

    name: str
    refusal: Callable[[GemmProblem, GpuTarget], str | None]
    tactics: "Callable[[LoweringContext, GemmProblem], tuple[Tactic, ...]]"


MmaWarps = Callable[[GemmProblem, Tile, GpuTarget], int]
"""Returns the warps of a tile that stores results in the MMA layout; 0: in that of the compiler."""


def no_mma_layout(_problem: GemmProblem, _tile: Tile, _gpu: GpuTarget) -> int:
    """Return 0: tiles store results in the compiler's layout."""
    return 0


def tactics_of(ctx: "LoweringContext", problem: GemmProblem) -> tuple[Tactic, ...]:
    """Return the tactics of every schedule that applies."""
    return tuple(
        tactic
        for schedule in ctx.schedules
        if schedule.refusal(problem, ctx.gpu) is None
        for tactic in schedule.tactics(ctx, problem)
    )


def add_gemm(ctx: "LoweringContext", nodes: tuple[str, ...], problem: GemmProblem) -> None:
    """Add the matrix product that `nodes` compute."""
    ctx.ops.append(TunableOp(nodes, tactics_of(ctx, problem), problem))
