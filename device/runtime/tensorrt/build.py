"""The child process that builds one segment: `python -m device.runtime.tensorrt.build REQUEST`.

DLA builds are known to end with a segmentation fault, so nothing else happens in this process. It
writes the plan and the log, and one JSON line to standard output.
"""

import os
import sys
from pathlib import Path
from typing import Any, TextIO

import msgspec

from device.files import replacing
from device.runtime.tensorrt.build_dla import build_for_dla, why_not_on_dla
from device.runtime.tensorrt.build_gpu import build_for_gpu
from device.runtime.tensorrt.messages import explain
from device.runtime.tensorrt.network import RefusedError, make_logger
from device.runtime.tensorrt.request import Answer, OnDla, Request


def main(argv: list[str]) -> int:
    """Build the request in the file `argv[1]`."""
    request = msgspec.json.decode(Path(argv[1]).read_bytes(), type=Request)
    import tensorrt

    version = str(tensorrt.__version__)
    refused: tuple[str, ...] = ()
    problem = None
    # TensorRT's objects log until they are gone, which is when `build` has returned.
    with Path(request.log).open("w", encoding="utf-8") as log:
        try:
            refused = build(tensorrt, version, request, log)
        except RefusedError as error:
            problem = str(error)
    answer = Answer(tensorrt=version, refused_layers=refused, problem=problem)
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    return 0


def build(trt: Any, version: str, request: Request, log: TextIO) -> tuple[str, ...]:  # noqa: ANN401
    """Build the plan and write it; return the layers that TensorRT keeps off the DLA.

    `trt`: the module tensorrt. `log`: the file `request.log`. Raises RefusedError.
    """
    logger = make_logger(trt, log)
    builder = trt.Builder(logger)
    refused: tuple[str, ...] = ()
    if isinstance(request.target, OnDla):
        plan, config, refused = build_for_dla(trt, version, request, builder, logger)
    else:
        plan, config = build_for_gpu(trt, version, request, builder, logger)
    if plan is None:
        raise RefusedError(_why(request, refused))
    _write(Path(request.plan), memoryview(plan))
    with replacing(Path(request.timing_cache)) as file:  # another build may read it now
        file.write(memoryview(config.get_timing_cache().serialize()))
    return refused


def _why(request: Request, refused: tuple[str, ...]) -> str:
    lines = Path(request.log).read_text(encoding="utf-8", errors="replace").splitlines()
    known = explain(lines)
    if known is not None:
        return known
    if refused:
        return why_not_on_dla(refused)
    last = lines[-1] if lines else "it says nothing"
    return f"TensorRT builds no plan; its last line: {last}"


def _write(path: Path, data: memoryview) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    sys.exit(main(sys.argv))
