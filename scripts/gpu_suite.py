"""Compile lowered segments and run them on this machine's GPU, for the ONNX backend suite."""

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
from toolkit.gpu.compile_segment import GpuSegment, compile_segment
from toolkit.gpu.lower import KernelProgram
from toolkit.gpu.target import GpuTarget

PROFILE = "h200"


def target() -> GpuTarget:
    """Return the GPU of PROFILE."""
    profile = load_profile(PROFILE)
    assert profile.gpu is not None
    return GpuTarget.of(profile.gpu, profile.memory)


def run_compiled(program: KernelProgram, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Compile the first tactic of each operation, write an engine, and run it as a session.

    Raises CompileError, EngineError and SessionError as these do; RuntimeError: no GPU ran it.
    """
    first = tuple(replace(op, tactics=op.tactics[:1]) for op in program.ops)
    compiled = compile_segment("gpu0", replace(program, ops=first), gpu=target())
    with tempfile.TemporaryDirectory(prefix="tandem-suite-") as folder:
        path = Path(folder) / "m.engine"
        write_engine(path, _manifest(program, compiled, feeds), compiled.entries)
        with open_engine(path) as engine, Session(engine) as session:
            (report,) = session.reports
            if report.implementation != "cuda":
                raise RuntimeError(f"no GPU runs it: {report.reason}")
            read = {
                name: np.ascontiguousarray(feeds[name], view.dtype).reshape(view.shape)
                for name, view in program.inputs.items()
            }
            return session.infer({**feeds, **read})


def _manifest(program: KernelProgram, compiled: GpuSegment, feeds: Mapping[str, Array]) -> Manifest:
    """Describe an engine of one segment; unread inputs remain inputs of the model."""
    unread = {name: value for name, value in feeds.items() if name not in program.inputs}
    views = {**program.inputs, **program.outputs}
    tensors = tuple(
        TensorInfo(name=name, dtype=str(value.dtype), shape=tuple(map(int, value.shape)))
        for name, value in (*views.items(), *unread.items())
    )
    segment = Segment(
        name="gpu0",
        processor="gpu",
        inputs=tuple(program.inputs),
        outputs=tuple(program.outputs),
        nodes=tuple(dict.fromkeys(node for op in program.ops for node in op.nodes)),
        implementations=(compiled.implementation,),
    )
    return Manifest(
        format=FORMAT_VERSION,
        profile=PROFILE,
        inputs=(*program.inputs, *unread),
        outputs=tuple(program.outputs),
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
