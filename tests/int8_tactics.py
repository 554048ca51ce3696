"""Tactics of INT8, interpreted on the CPU: each gives the bits of `int8_reference`."""

from collections.abc import Mapping
from dataclasses import replace

import gpu_interpreter
import int8_reference
import numpy as np
from gpu_graphs import Case

from device.engine.manifest import DimRange
from toolkit.gpu.emit.context import TunableOp
from toolkit.gpu.lower import lower_segment
from toolkit.gpu.shapes.inference import traces_of, with_steps
from toolkit.gpu.target import GpuTarget


def check_tactics(case: Case, kernel: str, gpu: GpuTarget) -> list[Mapping[str, object]]:
    """All tactics by this kernel are exact; return the constants of each."""
    segment = case.lower("int8", gpu)
    rng = np.random.default_rng(len(case.nodes))
    feeds = {n: rng.normal(size=s).astype(np.float32) for n, s in case.inputs.items()}
    truths = int8_reference.run(case.model(), feeds)
    tried = []

    def uses(op: TunableOp) -> list[tuple[object, ...]]:
        return [t for t in op.tactics if any(call.spec.title == kernel for call in t)]

    for at, op in enumerate(segment.ops):
        for tactic in uses(op):
            ops = [*segment.ops]
            ops[at] = replace(op, tactics=(tactic,))
            found = gpu_interpreter.run(replace(segment, ops=tuple(ops)), feeds)
            for name, truth in truths.items():
                assert len(np.unique(truth)) > 4
                np.testing.assert_array_equal(found[name], truth, strict=True)
            tried.append(dict(tactic[0].spec.constants))
    return tried


def check_dynamic(case: Case, kernel: str, gpu: GpuTarget, rng: np.random.Generator) -> None:
    """One program with this kernel is exact at the least, the largest and other sizes.

    The input x has the dimensions "batch" and "height".
    """
    dims = (
        DimRange(name="batch", min=1, opt=2, max=4),
        DimRange(name="height", min=5, opt=8, max=13),
    )
    piece = case.segment()
    traces = traces_of(with_steps([piece.model], dims))
    segment = lower_segment(piece.model, gpu=gpu, precision="int8", traces=traces)
    assert kernel in [call.spec.title for call in segment.launches]
    for point in ((1, 5), (4, 13), tuple(int(rng.integers(d.min, d.max + 1)) for d in dims)):
        sizes = {"batch": point[0], "height": point[1]}
        shape = [sizes.get(n, n) for n in case.inputs["x"]]
        feeds = {"x": rng.normal(size=shape).astype(np.float32)}
        found = gpu_interpreter.run(segment, feeds, point)
        for name, truth in int8_reference.run(case.model(), feeds).items():
            np.testing.assert_array_equal(found[name], truth, strict=True)
