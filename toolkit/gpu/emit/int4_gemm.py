"""Products with weights of 4 bits in blocks of the depth (`toolkit.gpu.kernels.int4`).

Kernels of more than 16 rows multiply by scales in FP16, so those of a column are stored as shares
of its largest, which is the column's factor in the epilogue: no weight overflows FP16. They lose
digits of blocks whose share is below 2**-14 (6.1e-5), and take those below 2**-25 (3e-8) as 0. That
counts only where such blocks multiply numbers that are larger than those of others by as much.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.emit.split_k import partial_sums, split_k_reduce_launch, split_k_refusal
from toolkit.gpu.ir.gemm import DenseLoader, GemmProblem
from toolkit.gpu.ir.launch import KernelLaunch, Tactic, TunableOp
from toolkit.gpu.ir.network import Array, Operation
from toolkit.gpu.ir.view import View
from toolkit.gpu.schedule.int4_tiles import SPAN, int4_tiles
from toolkit.gpu.schedule.tiles import Tile
from toolkit.gpu.shapes.sizes import ceil_div, fixed
from toolkit.graph.block_weights import SYMMETRIC_ZERO, BlockWeight

GROUPS = (16, 32, 64, 128, 256)  # block sizes that kernels take
_PADDED = 256  # the depth of words: a multiple of every step


@dataclass(frozen=True, slots=True)
class Int4Weights:
    """`words` int16 (columns, words); `scales`, `zeros` float32 (groups, columns).

    `zeros` None: all are 8. `factors`: of columns, float32.
    """

    words: View
    scales: View
    zeros: View | None
    factors: Array
    group: int

    def operands(self) -> Mapping[str, View | None]:
        """Return what kernels read, by the names of their parameters."""
        return {"b": self.words, "scales": self.scales, "zeros": self.zeros}


def int4_weights(ctx: LoweringContext, op: Operation, *, transposed: bool) -> Int4Weights | None:
    """Return the packed weights of a product; None where floats are multiplied.

    `transposed`: the weight is (columns, depth).
    """
    tensor = ctx.network.blocks.get(op.inputs[1])
    if tensor is None or tensor.transposed != transposed or tensor.weight.block not in GROUPS:
        return None
    if not ctx.gpu.has_matrix_units or ctx.float_type(*op.inputs[:2]) != "float16":
        return None
    return _packed(ctx, tensor.weight)


def _packed(ctx: LoweringContext, weight: BlockWeight) -> Int4Weights:
    depth, columns = weight.integers.shape
    padded = ceil_div(depth, _PADDED) * _PADDED
    integers = np.zeros((columns, padded), np.uint16)
    integers[:, :depth] = weight.integers.T
    runs = integers.reshape(columns, padded // SPAN, 4, SPAN // 4)
    shifts = np.arange(0, 16, 4, dtype=np.uint16)[None, None, :, None]
    words = np.bitwise_or.reduce(runs << shifts, 2).view(np.int16)
    factors = np.abs(weight.scales).max(0)
    factors = np.where(factors > 0, factors, 1).astype(np.float32)
    groups = ceil_div(padded, weight.block)
    scales, zeros = (np.zeros((groups, columns), np.float32) for _ in range(2))
    scales[: len(weight.scales)] = weight.scales / factors
    zeros[: len(weight.zeros)] = weight.zeros
    symmetric = bool((weight.zeros == SYMMETRIC_ZERO).all())
    return Int4Weights(
        ctx.weights.pack(words.reshape(columns, -1), "int16"),
        ctx.weights.pack(scales, "float32"),
        None if symmetric else ctx.weights.pack(zeros, "float32"),
        factors,
        weight.block,
    )


def add_int4_gemm(
    ctx: LoweringContext, nodes: tuple[str, ...], problem: GemmProblem, weights: Int4Weights
) -> None:
    """Add the product that `nodes` compute, with a tactic for each of the best tiles."""
    left = problem.left
    assert isinstance(left, DenseLoader)
    split_k = split_k_refusal(problem) is None and fixed(problem.shape.rows)
    tiles = int4_tiles(problem.shape, weights.group, ctx.gpu, split_k=split_k)
    tactics = tuple(_tactic(ctx, problem, weights, left, tile) for tile in tiles)
    ctx.ops.append(TunableOp(nodes, tactics))


def _tactic(
    ctx: LoweringContext,
    problem: GemmProblem,
    weights: Int4Weights,
    left: DenseLoader,
    tile: Tile,
) -> Tactic:
    if tile.split_k == 1:
        return (_tiled_launch(problem, weights, left, tile),)
    partial = partial_sums(ctx, problem, tile.split_k)
    reduced = split_k_reduce_launch(ctx, problem, partial.y)
    return _tiled_launch(partial, weights, left, tile), reduced


def _tiled_launch(
    problem: GemmProblem, weights: Int4Weights, left: DenseLoader, tile: Tile
) -> KernelLaunch:
    """Return the launch of `int4_gemm`."""
    shape, y, residual = problem.shape, problem.y_strides, problem.residual_strides
    a = left.strides
    blocks = ceil_div(shape.rows, tile.rows) * ceil_div(shape.columns, tile.columns)
    return make_launch(
        "int4_gemm",
        (blocks, shape.batch, tile.split_k),
        {
            "a": left.view,
            **weights.operands(),
            **problem.epilogue_operands(),
            "y": problem.y,
            "rows": shape.rows,
        },
        {
            "DEPTH": shape.depth,
            "COLUMNS": shape.columns,
            "INNER": problem.inner,
            "GROUP": weights.group,
            "A_STRIDES": (a.outer, a.batch, a.row, a.column),
            "B_PITCH": weights.words.shape[1],
            "Y_STRIDES": (y.outer, y.batch, y.row),
            "R_STRIDES": (residual.outer, residual.batch, residual.row),
            "EPILOGUE": problem.epilogue.ops,
            "SPLIT_K": tile.split_k,
            "PARTS": tile.parts,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
            "BLOCK_K": tile.depth,
        },
        writes=(problem.y,),
        warps=tile.warps,
        stages=tile.stages,
    )
