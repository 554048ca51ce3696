"""What sm_90 adds to the lowering."""

from toolkit.gpu.emit.generation import Generation
from toolkit.gpu.sm90.back_to_back import fuse_back_to_back
from toolkit.gpu.sm90.conv_max_pool import emit_conv_max_pool
from toolkit.gpu.sm90.direct_conv import DIRECT, emit_direct_conv
from toolkit.gpu.sm90.mma import mma_warps
from toolkit.gpu.sm90.passes.conv_max_pool import CONV_MAX_POOL, CONV_MAX_POOL_RULES
from toolkit.gpu.sm90.passes.direct_conv import DIRECT_CONV, DIRECT_CONV_RULES
from toolkit.gpu.sm90.passes.upsample_concat import CONV_UPSAMPLE_CONCAT, UPSAMPLE_CONCAT_RULES
from toolkit.gpu.sm90.persistent_conv import PERSISTENT_CONV
from toolkit.gpu.sm90.persistent_gemm import PERSISTENT_GEMM
from toolkit.gpu.sm90.row_panel import ROW_PANEL
from toolkit.gpu.sm90.upsample_concat import UPSAMPLE_CONCAT, emit_conv_upsample_concat
from toolkit.gpu.target import GpuTarget


def _applies(gpu: GpuTarget) -> bool:
    # Elsewhere operands go through registers too: 254 of 255 on sm_87, and it was not timed there.
    return gpu.has_wgmma


GENERATION = Generation(
    applies=_applies,
    early_rules=(*DIRECT_CONV_RULES, *UPSAMPLE_CONCAT_RULES),
    stem_rules=CONV_MAX_POOL_RULES,
    emitters={
        DIRECT_CONV: emit_direct_conv,
        CONV_UPSAMPLE_CONCAT: emit_conv_upsample_concat,
        CONV_MAX_POOL: emit_conv_max_pool,
    },
    epilogues=dict.fromkeys((DIRECT_CONV, CONV_UPSAMPLE_CONCAT, CONV_MAX_POOL), 0),
    preferred=(ROW_PANEL, PERSISTENT_CONV, DIRECT, UPSAMPLE_CONCAT),
    alternatives=(PERSISTENT_GEMM,),
    mma_warps=mma_warps,
    fuse=fuse_back_to_back,
)
