"""A report written by hand: what a board might say, with three rules that it contradicts."""

from device.runtime.cuda.facts import GpuFacts
from device.selftest.report import (
    KernelRow,
    LayerRow,
    Machine,
    NetworkRow,
    Output,
    Report,
    RuleRow,
    SegmentRow,
    StepRow,
)

GPU = GpuFacts(
    name="Orin", sm=87, sm_count=8, sm_mhz=918, memory_mhz=3200, l2_bytes=2**21, cuda="12.6",
    driver="36.4.3", power_mode="0",
)  # fmt: skip


def rule(name: str, side: str, *, expected: bool, takes: bool | None, **options: object) -> RuleRow:
    return RuleRow(
        item=f"{name}-{side}", rule=name, side=side, op="Conv", precision="int8",
        certainty="documented", expected=expected, asked=takes, built=takes, **options,
    )  # fmt: skip


RULES = (
    rule("conv.stride", "at", expected=True, takes=True),
    rule("conv.stride", "beyond", expected=False, takes=False),
    rule("min.conflict", "beyond", expected=False, takes=True),
    rule("clip.lower", "at", expected=True, takes=True),
    rule("clip.lower", "beyond", expected=False, takes=True),
    rule("resize.mode", "at", expected=True, takes=False, said="DLA only supports kHALF_PIXEL"),
    rule("pool.window", "at", expected=True, takes=True),
    rule("lrn.window", "at", expected=True, takes=None, problem="its process crashed (SIGSEGV)"),
)


def report(*networks: NetworkRow) -> Report:
    return Report(
        tandem="0.1.0",
        kit="00" * 32,
        profile="orin-nx-16gb",
        seconds=900.0,
        steps=(StepRow(name="rules", items=8, done=8, seconds=60.0, crashes=1),),
        machine=Machine(
            model="NVIDIA Jetson Orin NX", l4t="36.4.3", tensorrt="10.3.0", dla_cores=2,
            power_mode="0", power_mode_name="MAXN", gpu=GPU,
        ),
        kernels=(
            KernelRow(
                item="convolutions-fp16", precision="fp16", kernels=9, tactics=12, tried=12,
                rounds=4, repeatable=True,
                outputs=(
                    Output(name="y", elements=40, differing=3, largest=1e-3, relative=2e-4,
                           limit=2e-2, sha256="ab" * 32),
                ),
            ),
        ),
        rules=RULES,
        networks=networks,
    )  # fmt: skip


def network(name: str, sha256: str, variant: str, *segments: SegmentRow) -> NetworkRow:
    layers = () if variant == "dla" else (LayerRow(nodes=("conv0", "relu0"), time_us=11.5),)
    return NetworkRow(
        item=f"{name}-int8-{variant}", network=name, variant=variant, precision="int8",
        model_sha256=sha256, runs=100, median_ms=1.5, p10_ms=1.4, p90_ms=1.7,
        segments=segments, layers=layers, watts={"VDD_IN": 9.5},
    )  # fmt: skip


def on_dla(*nodes: str, time_us: float = 900.0, implementation: str = "tensorrt") -> SegmentRow:
    return SegmentRow(
        name="dla0_0", processor="dla0", implementation=implementation, reason="",
        nodes=nodes, time_us=time_us,
    )  # fmt: skip
