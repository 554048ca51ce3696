"""Sources of the figures of `configurations.py`, field by field, and their certainty.

`documented`: in the open hardware's specification or source, or published by NVIDIA. `observed`: in
a simulation of the open hardware. `inferred`: a reasoned guess, to be fitted, and marked wherever a
result depends on it.
"""

from dataclasses import dataclass
from typing import Literal

Certainty = Literal["documented", "observed", "inferred"]


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a value and its certainty."""

    certainty: Certainty
    text: str


SPEC = "nvdla/hw, spec/defs/<name>.spec (nv_full: branch nvdlav1, others: master)"
FULL = ("nv_full",)
MASTER = (
    "nv_large",
    "nv_medium_1024_full",
    "nv_medium_512",
    "nv_small_256",
    "nv_small_256_full",
    "nv_small",
)
OPEN = (*FULL, *MASTER)
EVERY = (*OPEN, "xavier", "orin")
ARRAY = ("atomic_c", "atomic_k", "atomic_k_fp16")
ORDER = ("stripe", "long_stripes", "image_stripe", "package_minimum", "weight_bytes")
BUFFER = ("banks", "bank_bytes", "entry_bytes")
RATES = ("sdp_x", "sdp_y", "pdp", "cdp")
UNITS = ("winograd", "image_post_extension", "max_batch")

# The first row with both name and field counts.
ROWS: tuple[tuple[tuple[str, ...], tuple[str, ...], Certainty, str], ...] = (
    (EVERY, ("name", "generation"), "documented", "the published name"),
    (
        EVERY,
        ("mac_efficiency",),
        "inferred",
        "1: the sequence has no idle clocks of its own; fit to measurements",
    ),
    (
        EVERY,
        ("memory_efficiency",),
        "inferred",
        "1: every byte of the share is used; fit to measurements",
    ),
    (
        EVERY,
        ("overlap",),
        "inferred",
        "1: the optimistic end, as in NVIDIA's performance workbook; fit to measurements",
    ),
    (
        EVERY,
        ("uses_winograd",),
        "inferred",
        "no: nvdla/sw CompilerFeatures.md has none for INT8; NVIDIA's own compiler is closed",
    ),
    (
        (*OPEN, "xavier"),
        ("depthwise_channels",),
        "documented",
        "the open hardware has no groups (nvdla/sw ConvCoreNode.cpp, squashWeightGroups)",
    ),
    (
        EVERY,
        ("split_weight_banks",),
        "documented",
        "nvdla/sw, umd/core/src/compiler/include/priv/Profile.h, CompileParams; closed compilers "
        "may differ",
    ),
    (
        FULL,
        ("layer_overhead",),
        "observed",
        "21 clocks before the first package, 49 behind the last: a simulation of the sequencer",
    ),
    (EVERY, ("layer_overhead",), "inferred", "as simulated for nv_full; without software"),
    (OPEN, (*ARRAY, *BUFFER, *RATES, "port_bytes", "memory_atom_bytes"), "documented", SPEC),
    (
        FULL,
        ORDER,
        "documented",
        "nvdla/hw nvdlav1, vmod/nvdla/csc/NV_NVDLA_CSC_sg.v:2925-2955, 5072-5116, 7190-7275",
    ),
    (
        MASTER,
        ORDER,
        "documented",
        "nvdla/hw master, vmod/nvdla/csc/NV_NVDLA_CSC_sg.v:500-584, 760-786 and NV_NVDLA_CSC.h",
    ),
    (OPEN, UNITS, "documented", "nvdla/hw, spec/defs/<name>.spec and hw/v1/ias"),
    (
        ("xavier",),
        (*ARRAY, *ORDER, *BUFFER, *RATES, "port_bytes", *UNITS, "memory_atom_bytes"),
        "inferred",
        "nv_full: nvdla/sw LowPrecision.md says that Xavier has NVDLA integrated, and 2048 x 2 x "
        "1.395 GHz agrees with 5.7 TOPS a core",
    ),
    (
        ("orin",),
        ("atomic_c", "atomic_k"),
        "inferred",
        "8192 dense INT8 MACs: 52.5 sparse TOPS a core / 2 / 2 / 1.6 GHz; the division is a guess",
    ),
    (
        ("orin",),
        ("atomic_k_fp16",),
        "inferred",
        "512 FP16 MACs: up to twice as slow as Xavier's 1024 in FP16 (DLA software FAQ)",
    ),
    (
        ("orin",),
        ("depthwise_channels",),
        "inferred",
        "none, as on v1; the second generation is not open",
    ),
    (
        ("orin",),
        (*ORDER, *BUFFER, *RATES, "port_bytes", *UNITS, "memory_atom_bytes"),
        "inferred",
        "nv_full grown with its array where a balance needs it; nothing is published: fit",
    ),
)


def source_of(name: str, field: str) -> Source:
    """Return where a field of the configuration `name` comes from.

    Raises KeyError: no such configuration or field.
    """
    for names, covered, certainty, text in ROWS:
        if name in names and field in covered:
            return Source(certainty, text)
    raise KeyError(f"{name}.{field}")
