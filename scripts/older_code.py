"""Engines for this machine's GPU whose kernels are compiled as for an older one.

PTX for an older GPU is valid for a newer one. So Triton compiles for the older GPU, whose tensor
cores take `mma.sync` in place of `wgmma`, ptxas assembles that for the newer one, and the engine's
manifest names the GPU that runs it.
"""

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from device.engine.cuda_manifest import Cuda
from device.engine.file import open_engine, write_engine

CODES = ("sm_80", "sm_87")  # both with mma.sync
PTXAS = "TRITON_PTXAS_PATH"
CACHE = "TANDEM_CACHE"


@contextmanager
def compiling_older(folder: Path, code: str, sm: int) -> Iterator[None]:
    """Let builds for `code`, in this process and its own, assemble kernels for SM `sm`.

    `folder` gets what stands for ptxas, and a cache of its own: these kernels are not `code`'s.
    """
    from triton import knobs  # NVIDIA's tools are beside it

    wrapper = folder.absolute() / f"ptxas-{code}"
    wrapper.write_text(_wrapper_text(knobs.nvidia.ptxas.path, code, f"sm_{sm}"))
    wrapper.chmod(0o755)
    with _environment({PTXAS: str(wrapper), CACHE: str(folder.absolute() / f"cache-{code}")}):
        yield


def _wrapper_text(ptxas: str, code: str, target: str) -> str:
    return f"""\
#!/bin/sh
for argument do
    shift
    [ "$argument" = --gpu-name={code} ] && argument=--gpu-name={target}
    set -- "$@" "$argument"
done
exec {shlex.quote(ptxas)} "$@"
"""


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def name_gpu(path: Path, sm: int) -> None:
    """Write into an engine of `compiling_older` that its kernels are for SM `sm`."""
    with open_engine(path) as engine:
        segments = tuple(
            replace(
                segment,
                implementations=tuple(
                    replace(one, sm=sm) if isinstance(one, Cuda) else one
                    for one in segment.implementations
                ),
            )
            for segment in engine.manifest.segments
        )
        if segments != engine.manifest.segments:
            entries = {name: engine.entry(name) for name in engine.entries}
            write_engine(path, replace(engine.manifest, segments=segments), entries)
