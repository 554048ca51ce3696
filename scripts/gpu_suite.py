"""Drafted segments, compiled and run on this machine's GPU: for the ONNX backend suite."""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from device.engine.file import FORMAT_VERSION, open_engine, write_engine
from device.engine.manifest import Manifest, MemoryPlan, Provenance, Segment, TensorInfo
from device.profile import load_profile
from device.runtime.session import Session
from scripts.backend_suite import Array
from toolkit.gpu.compile import GpuSegment, compile_segment
from toolkit.gpu.lower import KernelProgram
from toolkit.gpu.target import GpuTarget

PROFILE = "h200"


def target() -> GpuTarget:
    """Return the GPU of PROFILE."""
    profile = load_profile(PROFILE)
    assert profile.gpu is not None
    return GpuTarget.of(profile.gpu, profile.memory)


def run_compiled(drafted: KernelProgram, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Compile the first tactic of each piece of work, write an engine, and run it as a session.

    Raises CompileError, EngineError and SessionError as these do; RuntimeError: no GPU ran it.
    """
    first = tuple(replace(work, tactics=work.tactics[:1]) for work in drafted.work)
    found = compile_segment("gpu0", replace(drafted, work=first), gpu=target())
    with tempfile.TemporaryDirectory(prefix="tandem-suite-") as folder:
        path = Path(folder) / "m.engine"
        write_engine(path, _manifest(drafted, found, feeds), found.entries)
        with open_engine(path) as engine, Session(engine) as session:
            (report,) = session.reports
            if report.implementation != "cuda":
                raise RuntimeError(f"no GPU runs it: {report.reason}")
            read = {
                name: np.ascontiguousarray(feeds[name], view.dtype).reshape(view.shape)
                for name, view in drafted.inputs.items()
            }
            return session.infer({**feeds, **read})


def _manifest(drafted: KernelProgram, found: GpuSegment, feeds: Mapping[str, Array]) -> Manifest:
    """Describe an engine of one segment; inputs that nothing reads are the model's still."""
    unread = {name: one for name, one in feeds.items() if name not in drafted.inputs}
    views = {**drafted.inputs, **drafted.outputs}
    tensors = tuple(
        TensorInfo(name=name, dtype=str(one.dtype), shape=tuple(map(int, one.shape)))
        for name, one in (*views.items(), *unread.items())
    )
    segment = Segment(
        name="gpu0",
        processor="gpu",
        inputs=tuple(drafted.inputs),
        outputs=tuple(drafted.outputs),
        nodes=tuple(dict.fromkeys(node for work in drafted.work for node in work.nodes)),
        implementations=(found.implementation,),
    )
    return Manifest(
        format=FORMAT_VERSION,
        profile=PROFILE,
        inputs=(*drafted.inputs, *unread),
        outputs=tuple(drafted.outputs),
        tensors=tensors,
        dims=(),
        segments=(segment,),
        crossings=(),
        memory=MemoryPlan(arena_bytes=0, buffers=()),
        plan=(),
        provenance=Provenance(
            model="test", model_sha256="0" * 64, precision="fp32", passes=(), versions={}
        ),
    )
