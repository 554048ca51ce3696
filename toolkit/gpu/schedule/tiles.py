"""Tiles of a matrix product, ranked by an estimate of their time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.gpu.ir.gemm import GemmShape
from toolkit.gpu.ir.view import Shape
from toolkit.gpu.shapes.sizes import ceil_div, fixed, opt, power_of_two
from toolkit.gpu.target import WARP, GpuTarget

_MIN_SIDE = 16  # smallest side of a tile
_MIN_DEPTH = {1: 32, 2: 16, 4: 16}  # of a main loop step, by bytes of an operand
# Of one row of an operand tile: a whole line of shared memory, or half of one where operands go
# through registers.
_MAX_ROW_BYTES = 128
_MAX_ROW_BYTES_IN_REGISTERS = 64
_MIN_WIDE_COLUMNS = 128  # of tiles that take a whole line with mma.sync
_MAX_WIDE_INT8_ROWS = 64  # with 128 accumulators: more spill at a depth of 128
# INT8 under one tap: two a step took 15.5 us for 14.4.
_HALF_CACHE_LINE_BYTES = 64
_MEMORY_BOUND_ELEMENTS = 1024  # of a memory-bound block
# Rows, columns and warps where a program keeps the right operand, of little depth, for several
# blocks of rows.
_RESIDENT_SHAPES = ((64, 64, 4), (64, 128, 4), (128, 64, 4), (64, 256, 8))
_MAX_RESIDENT_DEPTH = 160
# With mma.sync 25088 x 256 by 64 takes 52 us in 64 x 256, 37 in 64 x 128.
_MAX_RESIDENT_COLUMNS_MMA_SYNC = 128
_RESIDENT_STAGES = 2
# With wgmma other blocks hide copies of 1x1 convolutions better than a third stage does.
_MAX_STEPS_OF_TWO_STAGES = 8
_HIDING_BLOCKS = 3  # for each SM; two stages take more
_MAX_TACTICS = 4  # tiles that an engine carries for a product
_MAX_RESIDENT_TACTICS = 2  # more of them
_MAX_SPLIT_K_TACTICS = 2  # of them at most
# Columns of a block of a product of one row.
_VECTOR_COLUMNS = (1, 2, 4, 8, 16, 32)
_VECTOR_ELEMENTS = (256, 4096)  # of the right operand in a step, least and most
_MAX_VECTOR_STEP = 512  # of the depth
_MAX_VECTOR_STEPS = 64  # which are unrolled
_MAX_VECTOR_TACTICS = 2

# Rows, columns and warps of tiles; of equally good ones the first.
_TILE_SHAPES = (
    (64, 16, 4),
    (64, 32, 4),
    (64, 64, 4),
    (64, 128, 4),
    (128, 16, 4),
    (128, 32, 4),
    (128, 64, 4),
    (128, 128, 8),
    (128, 128, 4),
    (256, 64, 8),
    (64, 256, 4),
    (64, 256, 8),
    (128, 256, 8),
    (32, 64, 4),
    (32, 32, 4),
    (16, 64, 4),
    (16, 32, 4),
)
# Accumulators of a thread, by bytes of an operand. INT8 also requantizes with a residual; FP32
# takes three products of TF32: more leave no registers.
_MAX_ACCUMULATORS = {1: 64, 2: 128, 4: 64}
_MAX_ACCUMULATORS_PLAIN_INT8 = 128  # INT8 without a residual
# But for mma.sync: with wgmma wider ones are ranked too high, ResNet-50 on 14 SMs lost 14 %.
_MAX_INT8_COLUMNS = 128
_MAX_ACCUMULATORS_WITH_OPERANDS = 64  # where operands go through registers too, but for mma.sync
_MAX_RESULTS_WITHOUT_TENSOR_CORES = 1024  # larger tiles spill: operands are in registers, too

# The estimate, in cycles of one SM, was fitted to 1373 times of the products of ResNet-50 at batch
# 1 to 128, FP16 and INT8, on one H200 at 1.98 GHz, and partly again to 749 times: the tile ranked
# first takes 2.5 % longer than the fastest on average, 15 % at most. All have the H200's L2 cache.
_PROLOGUE_CYCLES = 1700  # of a lone block
_STEP_CYCLES = 245  # latency of a main loop step of a lone block
_COPY_CYCLES = 21  # more for each copy that a thread starts in it
_COPY_BYTES = 16  # of one copy
_HIDDEN_STEP_CYCLES = 40  # of a step beside its products, where other blocks hide the copies
_HIDDEN_BLOCK_CYCLES = 360  # of a block beside its steps, where other blocks hide the rest
_RESIDENT_BLOCK_CYCLES = 240  # the same, where the next block of rows is on its way
_VECTOR_BLOCK_CYCLES = 60  # of a block of a product of one row, beside what it reads
_EXPOSED_TAIL = 0.28  # of a lone block: what nothing hides
_L2_BYTES_PER_CYCLE = 40  # from the L2 cache to one SM
_STORE_BYTES_PER_CYCLE = 26  # from an SM in the epilogue
_REQUANTIZE_CYCLES = 0.08  # of one INT8 result
_MEMORY_EFFICIENCY = 0.789525  # of the peak bandwidth: 14.5 of 18.4 bytes a cycle on an H200
_MMA_EFFICIENCY = 0.63  # of the peak rate of tensor cores
# With mma.sync, FP16 and INT8, in place of those above: fitted to times of kernels compiled for
# sm_80 on 14 SMs of an H200, 138 FP16 products of six networks: the tile ranked first is within 5 %
# of the fastest for 85 %; for 80 % of 78 others.
_SHARED_BYTES_PER_CYCLE = 112  # that the warps of an SM read, each its own rows and columns
_HIDDEN_BLOCK_CYCLES_MMA_SYNC = 450
_RESIDENT_BLOCK_CYCLES_MMA_SYNC = 100
_STEP_CYCLES_OF_A_WARP = 10  # beside its products
_MMA_ROWS, _MMA_COLUMNS = 16, 8  # of one instruction
_FIXED_REGISTERS = 70  # of a thread beside its accumulators
_INT8_REGISTERS = 2  # more of them to requantize
_SM_REGISTERS = 65536  # of an SM; CUDA C++ Programming Guide, as the threads below
_SM_THREADS = 2048  # 1536 on sm_86, sm_87 and sm_89: no tile here comes near

# Split-K: how many parts, for how many blocks of an SM, with how many steps each.
_SPLIT_K_FACTORS = (2, 3, 4, 6, 8, 12, 16)
_MAX_BLOCKS_OF_SM = 4
_MIN_STEPS_PER_SPLIT = 2
_PARTIAL_BYTES = 4  # of a partial sum
_REDUCE_KERNEL_CYCLES = 3600


@dataclass(frozen=True, slots=True)
class Tile:
    """`rows` x `columns` results of a block; a main loop step has `depth`.

    With `split_k` over 1 that many blocks share the depth, and a second kernel adds their sums.
    `tail_columns`: columns of a second, narrower tile of the same block. `programs`: blocks of rows
    at once, each of which keeps the right operand for the next ones; 0: they do not. A tile of one
    row is multiplied without matrix units, but of weights of 4 bits. `parts`: of the depth, which a
    block with such weights takes side by side.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    split_k: int = 1
    tail_columns: int = 0
    programs: int = 0
    parts: int = 1


def gemm_tiles(
    shape: GemmShape,
    gpu: GpuTarget,
    *,
    split_k: bool = False,
    resident: bool = False,
    vector_columns: int | None = None,
) -> tuple[Tile, ...]:
    """Return the best tiles by estimate, the best first.

    `split_k`: with those that split K; `resident`: with those that keep the right operand;
    `vector_columns`: with those of a product of one row, of so many columns or more.
    """

    def ranked(tiles: list[Tile]) -> list[Tile]:
        return sorted(tiles, key=lambda tile: estimate_cycles(shape, tile, gpu))

    tile_shapes = [row for row in _TILE_SHAPES if _is_candidate(shape, *row, gpu=gpu)]
    unsplit = ranked([_tile(shape, *tile_shape, gpu=gpu) for tile_shape in tile_shapes])
    split: list[Tile] = []
    if split_k and gpu.has_matrix_units and fixed(shape.rows):
        split = [replace(tile, split_k=n) for tile in unsplit for n in _splits(shape, tile, gpu)]
    resident_tiles = (
        ranked(_resident_tiles(shape, gpu)) if resident and gpu.has_matrix_units else []
    )
    vectors = [] if vector_columns is None else ranked(_vector_tiles(shape, vector_columns))
    if gpu.exhaustive:
        return tuple(ranked(unsplit + ranked(split) + resident_tiles + vectors))
    count = _MAX_TACTICS if gpu.has_matrix_units else 1
    best = ranked(unsplit + ranked(split)[:_MAX_SPLIT_K_TACTICS])[:count]
    best += resident_tiles[:_MAX_RESIDENT_TACTICS]
    return tuple(ranked(best + vectors[:_MAX_VECTOR_TACTICS]))


def _vector_tiles(shape: GemmShape, fewest_columns: int) -> list[Tile]:
    """Return the tiles of a product of one row; none of another one."""
    depth = min(_MAX_VECTOR_STEP, power_of_two(shape.depth))
    if not fixed(shape.rows) or shape.rows != 1 or shape.depth > _MAX_VECTOR_STEPS * depth:
        return []
    least, most = _VECTOR_ELEMENTS
    return [
        Tile(1, columns, depth, 4, 1)
        for columns in _VECTOR_COLUMNS
        if columns >= fewest_columns
        and min(least, shape.columns * depth) <= columns * depth <= most
    ]


def _resident_tiles(shape: GemmShape, gpu: GpuTarget) -> list[Tile]:
    """Return the tiles that keep the right operand, in as many programs as run at once."""
    depth = 64 if shape.depth % 64 == 0 else 32
    most = _MAX_RESIDENT_DEPTH
    if shape.float8:  # a step is a line of shared memory
        depth, most = min(power_of_two(shape.depth), _MAX_ROW_BYTES), 2 * _MAX_RESIDENT_DEPTH
    if not _MIN_DEPTH[shape.item_bytes] < shape.depth <= most:
        return []
    tiles = []
    for rows, columns, warps in _RESIDENT_SHAPES:
        if gpu.has_mma_sync and columns > _MAX_RESIDENT_COLUMNS_MMA_SYNC:
            continue
        if _is_candidate(shape, rows, columns, warps, gpu=gpu):
            tile = Tile(rows, columns, depth, warps, _RESIDENT_STAGES, programs=1)
            room = gpu.sm_count * _resident_blocks(shape, tile, gpu)
            programs = max(1, room // ceil_div(shape.columns, columns))
            if _operand_bytes(shape, tile, gpu) <= gpu.shared_bytes:
                tiles.append(replace(tile, programs=programs))
    return tiles


def estimate_cycles(shape: GemmShape, tile: Tile, gpu: GpuTarget) -> float:
    """Estimate the time of a product with a tile, in cycles.

    It is bound by latency (waves of blocks that wait for their own steps), by the throughput of the
    SMs, or by memory.
    """
    if tile.rows == 1:
        return _vector_cycles(shape, tile, gpu)
    columns = ceil_div(shape.columns, tile.columns)
    blocks = _blocks(shape, tile.rows, tile.columns) * tile.split_k
    blocks_of_sm = ceil_div(blocks, gpu.sm_count)
    steps = ceil_div(ceil_div(opt(shape.depth), tile.depth), tile.split_k)
    stored_bytes = shape.stored_bytes if tile.split_k == 1 else _PARTIAL_BYTES
    copied = (tile.rows + (0 if tile.programs else tile.columns)) * tile.depth * shape.item_bytes
    copies = copied / (_COPY_BYTES * tile.warps * WARP)
    requantize = _REQUANTIZE_CYCLES if shape.is_int8 and tile.split_k == 1 else 0
    store = tile.rows * tile.columns * (stored_bytes / _STORE_BYTES_PER_CYCLE + requantize)
    copy = copied / _L2_BYTES_PER_CYCLE
    hidden_step = max(_multiply_cycles(shape, tile, gpu), copy)
    lone_step = max(_STEP_CYCLES + _COPY_CYCLES * copies, hidden_step)
    lone_block = _PROLOGUE_CYCLES + steps * lone_step + store
    hidden_block = _hidden_block_cycles(shape, tile, gpu)
    throughput = blocks_of_sm * (steps * hidden_step + store + hidden_block)
    stored = tile.rows * tile.columns * stored_bytes
    loaded = tile.rows * shape.unshared_depth * shape.item_bytes / columns
    memory = blocks_of_sm * (stored + loaded) / (_MEMORY_EFFICIENCY * gpu.memory_bytes)
    waves = ceil_div(blocks, gpu.sm_count * _resident_blocks(shape, tile, gpu))
    if tile.programs:  # blocks of rows follow each other
        rounds = ceil_div(ceil_div(opt(shape.rows), tile.rows), tile.programs)
        uneven = rounds * ceil_div(tile.programs * columns, gpu.sm_count) / blocks_of_sm
        return max(throughput, memory) * uneven + lone_block
    reduce = 0.0 if tile.split_k == 1 else _reduce_cycles(shape, tile.split_k, gpu)
    return max(waves * lone_block, max(throughput, memory) + _EXPOSED_TAIL * lone_block) + reduce


def _multiply_cycles(shape: GemmShape, tile: Tile, gpu: GpuTarget) -> float:
    """Estimate the products of a main loop step, in cycles, where copies are hidden."""
    products = gpu.products_per_cycle(shape.item_bytes)
    if _has_wide_warps(shape, gpu):
        read = _warp_sides(tile) * tile.depth * shape.item_bytes
        multiply = tile.rows * tile.columns * tile.depth / products
        step = _STEP_CYCLES_OF_A_WARP * tile.warps
        return multiply + read / _SHARED_BYTES_PER_CYCLE + step
    # Tensor cores of sm_90 take 64 rows at least; those of FP16 take fewer at half the speed.
    results = max(tile.rows, 64 if shape.item_bytes == 1 else 32) * tile.columns
    return results * tile.depth / (_MMA_EFFICIENCY * products) + _HIDDEN_STEP_CYCLES


def _hidden_block_cycles(shape: GemmShape, tile: Tile, gpu: GpuTarget) -> float:
    """Return the cycles of a block beside its steps, where other blocks hide the rest."""
    if _has_wide_warps(shape, gpu):
        return _RESIDENT_BLOCK_CYCLES_MMA_SYNC if tile.programs else _HIDDEN_BLOCK_CYCLES_MMA_SYNC
    return _RESIDENT_BLOCK_CYCLES if tile.programs else _HIDDEN_BLOCK_CYCLES


def _has_wide_warps(shape: GemmShape, gpu: GpuTarget) -> bool:
    """Whether warps have 128 accumulators a thread beside operands: mma.sync in FP16 and INT8."""
    return gpu.has_mma_sync and shape.item_bytes <= 2 and not shape.float8


def _warp_sides(tile: Tile) -> int:
    """Return the rows and columns that all warps read, as Triton divides a tile for mma.sync."""
    rows, columns = tile.rows, tile.columns  # of a warp
    for _ in range(tile.warps.bit_length() - 1):
        if rows > _MMA_ROWS and rows // _MMA_ROWS >= columns // (2 * _MMA_COLUMNS):
            rows //= 2
        else:
            columns //= 2
    return tile.warps * (rows + columns)


def _vector_cycles(shape: GemmShape, tile: Tile, gpu: GpuTarget) -> float:
    """Estimate the time of a product of one row, in cycles: the right operand is read once."""
    blocks_of_sm = ceil_div(_blocks(shape, 1, tile.columns), gpu.sm_count)
    block = tile.columns * shape.depth * shape.item_bytes / _L2_BYTES_PER_CYCLE
    latency = _PROLOGUE_CYCLES + ceil_div(shape.depth, tile.depth) * _STEP_CYCLES
    return latency + blocks_of_sm * (block + _VECTOR_BLOCK_CYCLES)


def _blocks(shape: GemmShape, rows: int, columns: int) -> int:
    """Return the number of tiles of `rows` x `columns` results in all products."""
    blocks = ceil_div(opt(shape.rows), rows) * ceil_div(opt(shape.columns), columns)
    return blocks * opt(shape.batch)


def _reduce_cycles(shape: GemmShape, parts: int, gpu: GpuTarget) -> float:
    """Estimate the time of the kernel that adds the sums of all parts, in cycles."""
    results = opt(shape.rows) * opt(shape.columns) * opt(shape.batch)
    moved = results * (parts * _PARTIAL_BYTES + shape.stored_bytes)
    return _REDUCE_KERNEL_CYCLES + moved / (_STORE_BYTES_PER_CYCLE * gpu.sm_count)


def _splits(shape: GemmShape, tile: Tile, gpu: GpuTarget) -> list[int]:
    """Return the numbers of parts for which there are SMs."""
    blocks = _blocks(shape, tile.rows, tile.columns)
    steps = ceil_div(shape.depth, tile.depth)
    return [
        parts
        for parts in _SPLIT_K_FACTORS
        if blocks * parts <= _MAX_BLOCKS_OF_SM * gpu.sm_count
        and ceil_div(steps, parts) >= _MIN_STEPS_PER_SPLIT
        and ceil_div(steps, ceil_div(steps, parts)) == parts  # no part is empty
    ]


def row_tile(rows: int, columns: int) -> Tile:
    """Return the tile of a memory-bound kernel: whole rows of channels first."""
    block_n = min(max(power_of_two(columns), 8), 64)
    block_m = max(1, min(power_of_two(rows), _MEMORY_BOUND_ELEMENTS // block_n))
    return Tile(block_m, block_n, 0, 4, 1)


def pixel_columns(y: Shape, rows: int) -> tuple[Tile, int]:
    """Return the tile of columns of `rows` output pixels of (N, C, H, W), and their number."""
    batch, channels, height, width = y
    columns = batch * ceil_div(height, rows) * width
    return row_tile(columns, channels), columns


def ranked_rows(y: Shape, choices: Sequence[int], sm_count: int) -> list[int]:
    """Return how many output rows a block may compute at a time, the best by estimate first.

    More rows load less, as long as blocks fill the GPU and no row of a block is empty; of equally
    good ones the first.
    """

    def order(rows: int) -> tuple[bool, int]:
        tile, columns = pixel_columns(y, rows)
        blocks = ceil_div(opt(columns), tile.rows) * ceil_div(y[1], tile.columns)
        return blocks < sm_count, -opt(y[2]) % rows

    return sorted(choices, key=order)


def _is_candidate(shape: GemmShape, rows: int, columns: int, warps: int, *, gpu: GpuTarget) -> bool:
    """Whether a tile is no larger than the product, and its accumulators fit the registers."""
    if rows > max(_MIN_SIDE, power_of_two(shape.rows)):
        return False
    if rows < 64 <= power_of_two(shape.rows) and not _small_tiles_help(shape, columns, gpu):
        return False
    if columns > max(2 * _MIN_SIDE, power_of_two(shape.columns)):
        return False
    if shape.block_columns not in (None, columns) or (
        columns > _MAX_INT8_COLUMNS and shape.is_int8 and not gpu.has_mma_sync
    ):
        return False
    if not gpu.has_matrix_units:
        return rows * columns <= _MAX_RESULTS_WITHOUT_TENSOR_CORES
    accumulators = _MAX_ACCUMULATORS[2 if shape.float8 else shape.item_bytes]
    if shape.is_int8 and shape.stored_bytes == 1:
        accumulators = _MAX_ACCUMULATORS_PLAIN_INT8
    # With mma.sync more spill then, 56 to 568 bytes a thread.
    if not (gpu.has_wgmma or (_has_wide_warps(shape, gpu) and not shape.holds_registers)):
        accumulators = _MAX_ACCUMULATORS_WITH_OPERANDS
    return rows * columns <= accumulators * warps * WARP


def _small_tiles_help(shape: GemmShape, columns: int, gpu: GpuTarget) -> bool:
    """Whether tiles of fewer than 64 rows may help: where SMs would be idle, but for FP8."""
    idle = _blocks(shape, 64, columns) < gpu.sm_count
    return not gpu.has_matrix_units or (idle and not shape.float8)


def _tile(shape: GemmShape, rows: int, columns: int, warps: int, *, gpu: GpuTarget) -> Tile:
    depth = _depth(shape, rows, columns, warps, gpu=gpu)
    steps = ceil_div(opt(shape.depth), depth)
    blocks = _blocks(shape, rows, columns)
    alone = blocks <= gpu.sm_count  # has all of the SM's shared memory
    stages = (4 if alone or rows + columns <= 128 else 3) if gpu.copies_while_computing else 2
    room = gpu.shared_bytes // ((rows + columns) * depth * shape.item_bytes)
    tile = Tile(rows, columns, depth, warps, max(1, min(stages, room, max(2, steps))))
    short = steps <= _MAX_STEPS_OF_TWO_STAGES and shape.unshared_depth == shape.depth
    many = blocks > _HIDING_BLOCKS * gpu.sm_count and _resident_blocks(shape, tile, gpu) > 1
    timed = gpu.has_wgmma and shape.item_bytes <= 2 and not shape.float8
    return replace(tile, stages=min(tile.stages, 2)) if timed and short and many else tile


def _depth(shape: GemmShape, rows: int, columns: int, warps: int, *, gpu: GpuTarget) -> int:
    """Return the depth of a step: a line of shared memory, or the whole depth if it is less."""
    if shape.item_bytes == 1 and shape.unshared_depth == _HALF_CACHE_LINE_BYTES < shape.depth:
        return _HALF_CACHE_LINE_BYTES
    minimum = _MIN_DEPTH[shape.item_bytes]
    few = rows * columns <= _MAX_ACCUMULATORS_WITH_OPERANDS * warps * WARP
    few |= shape.is_int8 and rows <= _MAX_WIDE_INT8_ROWS
    wide = _has_wide_warps(shape, gpu) and few and columns >= _MIN_WIDE_COLUMNS
    line = _MAX_ROW_BYTES if gpu.has_wgmma or wide else _MAX_ROW_BYTES_IN_REGISTERS
    maximum = line // shape.item_bytes if gpu.has_matrix_units else minimum
    maximum = min(maximum, shape.block_columns or maximum)  # under one tap
    return max(minimum, min(maximum, power_of_two(shape.depth)))


def _operand_bytes(shape: GemmShape, tile: Tile, gpu: GpuTarget) -> int:
    """Return the shared memory of the operands that are on their way, and of one that stays."""
    if tile.programs:
        whole = ceil_div(shape.depth, tile.depth) * tile.depth * shape.item_bytes
        return whole * (tile.rows * tile.stages + tile.columns) + tile.rows * tile.columns
    # With mma.sync the oldest stage is in registers; FP16 was fitted with all of them.
    stages = tile.stages - 1 if shape.is_int8 and _has_wide_warps(shape, gpu) else tile.stages
    return (tile.rows + tile.columns) * tile.depth * shape.item_bytes * max(1, stages)


def _resident_blocks(shape: GemmShape, tile: Tile, gpu: GpuTarget) -> int:
    """Return how many blocks run on an SM at once, by shared memory, registers and threads."""
    threads = tile.warps * WARP
    operands = _operand_bytes(shape, tile, gpu)
    shared = max(operands, tile.rows * tile.columns * shape.item_bytes)
    registers = tile.rows * tile.columns // threads + _FIXED_REGISTERS
    registers += _INT8_REGISTERS if shape.item_bytes == 1 else 0
    return max(
        1,
        min(
            gpu.shared_bytes // shared,
            _SM_REGISTERS // (threads * registers),
            _SM_THREADS // threads,
        ),
    )
