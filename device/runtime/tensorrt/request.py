"""One segment to be finished on the board: what passes to the child process, and back."""

import msgspec

from device.engine.tensorrt_manifest import Port, TensorRT
from device.runtime.tensorrt.releases import Release

SRAM_BYTES = 1 << 20
LOCAL_DRAM_BYTES = 1 << 30
GLOBAL_DRAM_BYTES = 1 << 29
WORKSPACE_BYTES = 1 << 28
"""Limits of the memory pools, the defaults of TensorRT's header but for the workspace. They are
always set: TensorRT 8.5 took half the SRAM that its header promises."""


class _Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the messages: frozen, and unknown keys are refused."""


class Request(_Value, frozen=True, kw_only=True):
    """A segment for one release of TensorRT.

    `model`: its ONNX, with the weights beside it. `plan`, `log`, `timing_cache`: files to write;
    the last is read, too, where it is there. `ranges` is empty but for a release that takes ranges.
    """

    model: str
    plan: str
    log: str
    timing_cache: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    ranges: dict[str, float]
    half_nodes: tuple[str, ...]


class Answer(_Value, frozen=True, kw_only=True):
    """What came of it. `problem`: why there is no plan.

    `refused_layers`: those that TensorRT says the DLA does not run, before it builds. Each differs
    from a rule of Tandem's table.
    """

    tensorrt: str
    refused_layers: tuple[str, ...] = ()
    problem: str | None = None


def make_request(
    implementation: TensorRT, release: Release, *, model: str, plan: str, log: str, cache: str
) -> Request:
    """Return the request for a segment's form that the release takes."""
    ranged = release.form == "ranged"
    return Request(
        model=model,
        plan=plan,
        log=log,
        timing_cache=cache,
        inputs=implementation.inputs,
        outputs=implementation.outputs,
        ranges=implementation.ranges if ranged else {},
        half_nodes=implementation.half_nodes if ranged else (),
    )
