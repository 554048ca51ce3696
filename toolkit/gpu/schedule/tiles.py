"""Sizes of the blocks that a kernel computes at a time, and which are the best by estimate."""

from dataclasses import dataclass, replace

from toolkit.gpu.ir.gemm import GemmShape
from toolkit.gpu.shapes.sizes import ceil_div, fixed, opt, power_of_two
from toolkit.gpu.target import GpuTarget

_LEAST = 16  # the smallest block side that a product of matrices takes
_LEAST_DEPTH = {1: 32, 2: 16, 4: 16}  # the smallest depth, by bytes of an operand
# Of one row of an operand's block: a whole line of shared memory, or half of one where the block
# goes through registers.
_DEEPEST_BYTES = 128
_DEEPEST_BYTES_IN_REGISTERS = 64
# INT8 under one tap: two taps a step took 15.5 us, one 14.4 (ResNet-50, layer 1, batch 32).
_HALF_LINE = 64
_RUNNING_MEAN = 1024  # elements that a memory-bound block holds at once
_CARRIED = 4  # tiles of a product that an engine carries
_CARRIED_IN_PARTS = 2  # of them at most

# Rows, columns and warps of the blocks to choose from; of equal ones the first.
_SHAPES = (
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
    (32, 64, 4),
    (32, 32, 4),
    (16, 64, 4),
    (16, 32, 4),
)
# Sums of a thread at most, by bytes of an operand. More leave no registers to scale and round with
# a residual (INT8), or for the three products that one of FP32 is.
_SUMS = {1: 64, 2: 128, 4: 64}
_SUMS_ALONE = 128  # INT8 without a residual
_SUMS_WITH_OPERANDS = 64  # where operands go through registers too
_LARGEST_WITHOUT_MATRIX_UNITS = 1024  # larger ones spill: a thread holds its sums and operands

# The estimate, in cycles of one SM. The numbers were fitted to 1373 times of the products of
# ResNet-50 at batch 1 to 128, FP16 and INT8, up to 13 tiles each, on one H200 at 1.98 GHz. Those of
# a block by itself, of rounding, of the L2 cache and of parts were fitted again, to 749 times of
# its convolutions of 3x3, its 1x1 ones with strides, and its deep layers at batch 1 and 8 in parts:
# the tile that the estimate puts first takes 2.5 % longer than the fastest on average, 15 % at
# most, and the best of the first four 0.3 % and 10 %. Memory gives one SM of an Orin 10 bytes a
# cycle and one of a Thor 9 (204.8 GB/s, 16 SMs, 1.3 GHz; 273 GB/s, 20 SMs, 1.575 GHz).
_START = 1700  # of one block by itself, beside its steps
_STEP = 245  # one step along the depth by itself: waiting, and starting copies and a product
_COPY = 21  # of them each copy that a thread starts
_COPIED_BYTES = 16  # by one
_STEP_BUSY = 40  # what a step costs beside its products where other blocks hide the copies
_BLOCK = 360  # what a block costs beside its steps where others hide the rest
_TAIL = 0.28  # of a block by itself: what nothing hides at the end
_L2_BYTES = 40  # from the L2 cache to one SM, each cycle
_STORE_BYTES = 26  # to and from the L2 cache at the end of a block, each cycle
_ROUNDING = 0.08  # what scaling, adding and rounding one result of INT8 takes
_MEMORY_BYTES = 14.5  # from and to memory, each cycle
_EFFICIENCY = 0.63  # of the products that tensor cores make at most
_OTHER_REGISTERS = 55  # of a thread beside its sums
_INT8_REGISTERS = 17  # more of them to scale, add and round
_REGISTERS = 65536  # of an SM; CUDA C++ Programming Guide, as the threads below
_THREADS = 2048  # 1536 on sm_86, sm_87 and sm_89: no tile here comes near
_WARP = 32

# Sums in parts: how many, for how many blocks of an SM, with how many steps each.
_PARTS = (2, 3, 4, 6, 8, 12, 16)
_MOST_BLOCKS = 4
_LEAST_STEPS = 2
_SUM_BYTES = 4
_SECOND_KERNEL = 3600  # cycles


@dataclass(frozen=True, slots=True)
class Tile:
    """A block of `rows` x `columns` results, computed `depth` products at a time.

    With `parts` over 1 that many blocks share the depth, and a second kernel adds their sums
    (split-K). `rest`: columns of a second, narrower accumulator of the block.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    parts: int = 1
    rest: int = 0


def gemm_tiles(product: GemmShape, gpu: GpuTarget, *, split_k: bool = False) -> tuple[Tile, ...]:
    """Return the best tiles by estimate, the best first; `in_parts`: those with parts, too."""

    def best(tiles: list[Tile]) -> list[Tile]:
        return sorted(tiles, key=lambda tile: estimate_cycles(product, tile, gpu))

    whole = best([_tile(product, *shape, gpu) for shape in _SHAPES if _fits(product, shape, gpu)])
    split: list[Tile] = []
    if split_k and gpu.has_matrix_units and fixed(product.rows):
        split = best([replace(tile, parts=n) for tile in whole for n in _parts(product, tile, gpu)])
    if gpu.exhaustive:
        return tuple(best(whole + split))
    carried = _CARRIED if gpu.has_matrix_units else 1
    return tuple(best(whole + split[:_CARRIED_IN_PARTS])[:carried])


def estimate_cycles(product: GemmShape, tile: Tile, gpu: GpuTarget) -> float:
    """Return about how long a product takes with a tile.

    Either blocks wait for their own steps, one after the other; or an SM is kept busy by all of
    its blocks; or memory is.
    """
    rows, columns = ceil_div(opt(product.rows), tile.rows), ceil_div(product.columns, tile.columns)
    blocks = rows * opt(columns) * opt(product.products) * tile.parts
    each = ceil_div(blocks, gpu.sm_count)
    steps = ceil_div(ceil_div(opt(product.depth), tile.depth), tile.parts)
    stored_bytes = product.stored_bytes if tile.parts == 1 else _SUM_BYTES
    # Tensor cores of sm_90 take 64 rows at least; those of FP16 take fewer at half the speed.
    results = max(tile.rows, 64 if product.item_bytes == 1 else 32) * tile.columns
    multiply = results * tile.depth / (_EFFICIENCY * gpu.products_per_cycle(product.item_bytes))
    copied = (tile.rows + tile.columns) * tile.depth * product.item_bytes
    copies = copied / (_COPIED_BYTES * tile.warps * _WARP)
    rounding = _ROUNDING if product.item_bytes == 1 and tile.parts == 1 else 0
    store = tile.rows * tile.columns * (stored_bytes / _STORE_BYTES + rounding)
    copy = copied / _L2_BYTES
    waiting = _START + steps * max(_STEP + _COPY * copies, multiply + _STEP_BUSY, copy) + store
    busy = each * (steps * max(multiply + _STEP_BUSY, copy) + store + _BLOCK)
    memory = each * tile.rows * tile.columns * stored_bytes / _MEMORY_BYTES
    memory += each * tile.rows * product.run * product.item_bytes / columns / _MEMORY_BYTES
    at_once = _blocks_at_once(product, tile, gpu)
    waves = ceil_div(blocks, gpu.sm_count * at_once)
    added = 0.0 if tile.parts == 1 else _adding(product, tile.parts, gpu)
    return max(waves * waiting, max(busy, memory) + _TAIL * waiting) + added


def _adding(product: GemmShape, parts: int, gpu: GpuTarget) -> float:
    """Return about how long a second kernel takes that adds the sums of parts."""
    results = opt(product.rows) * opt(product.columns) * opt(product.products)
    moved = results * (parts * _SUM_BYTES + product.stored_bytes)
    return _SECOND_KERNEL + moved / (_STORE_BYTES * gpu.sm_count)


def _parts(product: GemmShape, tile: Tile, gpu: GpuTarget) -> list[int]:
    """Return into how many parts the depth may go while there are SMs for them."""
    blocks = ceil_div(opt(product.rows), tile.rows) * ceil_div(opt(product.columns), tile.columns)
    steps = ceil_div(product.depth, tile.depth)
    return [
        parts
        for parts in _PARTS
        if blocks * product.products * parts <= _MOST_BLOCKS * gpu.sm_count
        and ceil_div(steps, parts) >= _LEAST_STEPS
        and ceil_div(steps, ceil_div(steps, parts)) == parts  # none is empty
    ]


def row_tile(rows: int, columns: int) -> Tile:
    """Choose the tile of a kernel that is bound by memory: whole rows of channels first."""
    block_n = min(max(power_of_two(columns), 8), 64)
    block_m = max(1, min(power_of_two(rows), _RUNNING_MEAN // block_n))
    return Tile(block_m, block_n, 0, 4, 1)


def _fits(product: GemmShape, shape: tuple[int, int, int], gpu: GpuTarget) -> bool:
    """Whether a block is as large as needed, and its sums stay in registers."""
    rows, columns, warps = shape
    if rows > max(_LEAST, power_of_two(product.rows)):
        return False
    if rows < 64 <= power_of_two(product.rows) and not _small_blocks_help(product, columns, gpu):
        return False
    if columns > max(2 * _LEAST, power_of_two(product.columns)):
        return False
    if not gpu.has_matrix_units:
        return rows * columns <= _LARGEST_WITHOUT_MATRIX_UNITS
    most = _SUMS[product.item_bytes]
    if product.item_bytes == product.stored_bytes == 1:
        most = _SUMS_ALONE
    if not gpu.has_wgmma:
        most = _SUMS_WITH_OPERANDS
    return rows * columns <= most * warps * _WARP


def _small_blocks_help(product: GemmShape, columns: int, gpu: GpuTarget) -> bool:
    """Whether blocks of fewer than 64 rows may help: of floats, where SMs would have no block."""
    blocks = ceil_div(opt(product.rows), 64) * ceil_div(opt(product.columns), columns)
    few = blocks * opt(product.products) < gpu.sm_count
    return not gpu.has_matrix_units or (product.item_bytes > 1 and few)


def _tile(product: GemmShape, rows: int, columns: int, warps: int, gpu: GpuTarget) -> Tile:
    depth = _depth(product, gpu)
    steps = ceil_div(opt(product.depth), depth)
    blocks = ceil_div(opt(product.rows), rows) * ceil_div(opt(product.columns), columns)
    alone = blocks * opt(product.products) <= gpu.sm_count  # has all of the SM's shared memory
    most = (4 if alone or rows + columns <= 128 else 3) if gpu.copies_while_computing else 2
    room = gpu.shared_bytes // ((rows + columns) * depth * product.item_bytes)
    return Tile(rows, columns, depth, warps, max(1, min(most, room, max(2, steps))))


def _depth(product: GemmShape, gpu: GpuTarget) -> int:
    """Products at a time: a whole line, or the depth if it is less."""
    if product.item_bytes == 1 and product.run == _HALF_LINE < product.depth:
        return _HALF_LINE
    least = _LEAST_DEPTH[product.item_bytes]
    line = _DEEPEST_BYTES if gpu.has_wgmma else _DEEPEST_BYTES_IN_REGISTERS
    most = line // product.item_bytes if gpu.has_matrix_units else least
    return max(least, min(most, power_of_two(product.depth)))


def _blocks_at_once(product: GemmShape, tile: Tile, gpu: GpuTarget) -> int:
    """Blocks that one SM holds, by shared memory, registers and threads."""
    threads = tile.warps * _WARP
    operands = (tile.rows + tile.columns) * tile.depth * product.item_bytes * tile.stages
    shared = max(operands, tile.rows * tile.columns * product.item_bytes)
    registers = tile.rows * tile.columns // threads + _OTHER_REGISTERS
    registers += _INT8_REGISTERS if product.item_bytes == 1 else 0
    return max(
        1, min(gpu.shared_bytes // shared, _REGISTERS // (threads * registers), _THREADS // threads)
    )
