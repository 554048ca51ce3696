"""Theoretical occupancy is what NVIDIA's own header computes."""

import itertools
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from toolkit.gpu.errors import CompileError
from toolkit.gpu.schedule.occupancy import occupancy
from toolkit.gpu.target import sm_limits

KNOWN = (53, 62, 72, 75, 80, 86, 87, 89, 90, 100, 110, 120)

# Reads "sm threads registers shared | limits" a line, prints blocks a line.
PROGRAM = """
#include <stdio.h>
#include "cuda_occupancy.h"
int main(void) {
    int sm, threads, registers, block_threads, blocks;
    size_t shared, sm_shared, block_shared, reserved;
    while (scanf("%d %d %d %zu %d %zu %zu %zu", &sm, &threads, &registers, &shared,
                 &block_threads, &sm_shared, &block_shared, &reserved) == 8) {
        cudaOccDeviceProp p = {0};
        cudaOccFuncAttributes f = {0};
        cudaOccDeviceState state = {0};
        cudaOccResult result;
        p.computeMajor = sm / 10; p.computeMinor = sm % 10;
        p.maxThreadsPerBlock = 1024; p.maxThreadsPerMultiprocessor = block_threads;
        p.regsPerBlock = 65536; p.regsPerMultiprocessor = 65536; p.warpSize = 32;
        p.sharedMemPerBlock = 48 * 1024; p.sharedMemPerMultiprocessor = sm_shared;
        p.sharedMemPerBlockOptin = block_shared; p.numSms = 8;
        p.reservedSharedMemPerBlock = reserved;
        f.maxThreadsPerBlock = 1024; f.numRegs = registers;
        f.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN; f.maxDynamicSharedSizeBytes = block_shared;
        f.numBlockBarriers = 1;
        state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
        if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &p, &f, &state, threads, shared))
            blocks = -1;
        else
            blocks = result.activeBlocksPerMultiprocessor;
        printf("%d\\n", blocks);
    }
    return 0;
}
"""


def reference(rows: list[tuple[int, int, int, int]], folder: Path) -> list[int]:
    """Blocks of an SM by NVIDIA's header, which comes with Triton."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None or shutil.which("cc") is None:
        pytest.skip("cuda_occupancy.h comes with Triton, and needs a C compiler")
    include = Path(spec.origin).parent / "backends" / "nvidia" / "include"
    source, program = folder / "occupancy.c", folder / "occupancy"
    source.write_text(PROGRAM)
    subprocess.run(["cc", f"-I{include}", str(source), "-o", str(program)], check=True)
    lines = []
    for sm, *requests in rows:
        one = sm_limits(sm)
        limits = (one.threads, one.shared_bytes, one.block_shared_bytes, one.reserved_bytes)
        lines.append(" ".join(map(str, (sm, *requests, *limits))))
    done = subprocess.run(
        [str(program)], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    return [int(line) for line in done.stdout.split()]


def test_blocks_of_an_sm_are_those_of_nvidia_s_header(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    rows = []
    for sm, warps in itertools.product(KNOWN, (1, 2, 4, 8, 16, 32)):
        most = min(255, 65536 // (warps * 32) // 8 * 8)
        for _ in range(10):
            shared = int(rng.integers(0, sm_limits(sm).block_shared_bytes + 1))
            rows.append((sm, warps * 32, int(rng.integers(16, most + 1)), shared))
        rows.append((sm, warps * 32, 16, 0))
    for (sm, threads, registers, shared), blocks in zip(
        rows, reference(rows, tmp_path), strict=True
    ):
        occupied = occupancy(sm, threads=threads, registers=registers, shared_bytes=shared)
        assert (occupied.blocks, occupied.warps) == (blocks, blocks * threads // 32), (
            sm,
            threads,
            registers,
            shared,
        )


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "limit", "share"),
    [
        (32, 0, "warps", 1.0),  # sm_87: 12 blocks of 4 warps are its 48 warps
        (40, 0, "warps", 1.0),  # 40 x 32 = 1280 registers, 12 warps of 16384
        (41, 0, "registers", 40 / 48),  # 1536 registers: 10 warps of a partition
        (32, 12 * 1024, "warps", 1.0),  # 13 KiB with the reserved one, 12 times in 164
        (32, 13 * 1024, "shared memory", 44 / 48),  # 14 KiB, 11 times
    ],
)
def test_what_bounds_the_warps_of_an_orin(
    registers: int, shared_bytes: int, limit: str, share: float
) -> None:
    occupied = occupancy(87, threads=128, registers=registers, shared_bytes=shared_bytes)
    assert (occupied.limit, occupied.share) == (limit, share)


def test_an_unknown_sm_is_named() -> None:
    with pytest.raises(CompileError, match="sm_99 is not known"):
        occupancy(99, threads=32, registers=16, shared_bytes=0)
