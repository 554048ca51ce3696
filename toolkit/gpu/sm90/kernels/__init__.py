"""Triton kernels for sm_90 alone, and the table of them; see `toolkit.gpu.kernels`."""

# Every kernel that this folder adds, and its module here.
KERNELS: dict[str, str] = {
    "conv_max_pool": "conv_max_pool",
    "conv_upsample_concat": "conv_upsample_concat",
    "direct_conv": "direct_conv",
    "persistent_conv": "persistent_conv",
    "persistent_gemm": "persistent_gemm",
    "row_panel_gemm": "row_panel",
}
