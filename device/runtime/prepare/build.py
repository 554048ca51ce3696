"""The child process that builds one segment: `python -m device.runtime.prepare.build REQUEST`.

DLA builds are known to end with a segmentation fault, so nothing else happens in this process. It
writes the plan and the log, and one JSON line to standard output. Then it leaves at once: what
TensorRT does at its end cannot take the plan away any more.
"""

import hashlib
import os
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from device.files import disk_problem, replacing
from device.runtime.prepare.build_dla import Built, build_for_dla
from device.runtime.prepare.build_gpu import build_for_gpu
from device.runtime.prepare.builder_calls import RefusedError, Tools, has_bytes, make_logger
from device.runtime.tensorrt.messages import explain, last_error, split_builds, text_of
from device.runtime.tensorrt.request import Answer, OnDla, Request


def main(argv: list[str]) -> None:
    """Build the request in the file `argv[1]`; this does not return."""
    request = msgspec.json.decode(Path(argv[1]).read_bytes(), type=Request)
    alive: list[Any] = []
    leave_with(answer(request, alive))


def leave_with(result: msgspec.Struct) -> None:
    """Write the result to standard output and end the process, without its clean-up."""
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def answer(request: Request, alive: list[Any]) -> Answer:
    """Build a request and say what came of it, whatever TensorRT does but crash.

    `alive` gets TensorRT's objects; see `Tools`.
    """
    version = ""
    with closing(_Log(Path(request.log))) as log:
        try:
            import tensorrt as trt

            version = str(trt.__version__)
            logger = make_logger(trt, log.write)
            builder = trt.Builder(logger)
            alive.extend((logger, builder))
            return _build(Tools(trt, logger, builder, log.lines, alive), version, request, log)
        except RefusedError as error:
            return Answer(tensorrt=version, problem=str(error))
        except ImportError as error:
            problem = f"TensorRT cannot be loaded: {error}"
            known = explain([str(error)])
            return Answer(
                tensorrt=version, problem=f"{problem}; {known}" if known else problem, passing=True
            )
        except OSError as error:
            return Answer(
                tensorrt=version, problem=disk_problem(Path(request.plan), error), passing=True
            )
        except MemoryError:
            return Answer(tensorrt=version, problem="there is no memory to build", passing=True)
        except Exception as error:  # noqa: BLE001  (TensorRT's bindings raise what C++ does)
            problem = f"TensorRT fails with {type(error).__name__}: {error}"
            first, again = split_builds(log.lines)
            known = explain([*(again or first), str(error)])
            return Answer(tensorrt=version, problem=f"{problem}; {known}" if known else problem)


def _build(tools: Tools, version: str, request: Request, log: "_Log") -> Answer:
    """Build the plan and write it. Raises RefusedError, OSError, and what TensorRT raises."""
    if isinstance(request.target, OnDla):
        built = build_for_dla(tools, version, request)
    else:
        built = Built(*build_for_gpu(tools, version, request))
    tools.alive.append(built.plan)
    if not has_bytes(built.plan):
        raise RefusedError(_why(log.lines, built))
    sha256 = _write(Path(request.plan), memoryview(built.plan))
    # The plan is there: without timings the next build takes longer, and that is all.
    try:
        timings = memoryview(built.config.get_timing_cache().serialize())
        with replacing(Path(request.timing_cache)) as file:  # another build may read it now
            file.write(timings)
    except Exception as error:  # noqa: BLE001  (as above)
        log.write(f"[W] the timing cache is not kept: {error}")
    return Answer(
        tensorrt=version,
        refused_layers=built.refused,
        fallback=built.fallback,
        plan_sha256=sha256,
    )


class _Log:
    """Lines of TensorRT, in memory and in a file: the last one before a crash counts.

    A log for which the disk has no room costs no plan.
    """

    def __init__(self, path: Path) -> None:
        self.lines: list[str] = []
        self._file = None
        with suppress(OSError):
            self._file = path.open("wb", buffering=0)

    def write(self, line: str) -> None:
        """Add a line; TensorRT's objects write some when they go, after the file is closed."""
        self.lines.append(line)
        if self._file is not None and not self._file.closed:
            with suppress(OSError):
                self._file.write(f"{line}\n".encode(errors="replace"))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _why(lines: list[str], built: Built) -> str:
    """Return why there is no plan; where a build with GPU fallback failed, too, what both said."""
    first, again = split_builds(lines)
    known = explain(first)
    if built.elsewhere:
        names = ", ".join(repr(name) for name in built.elsewhere[:3])
        fallback = f"with GPU fallback {len(built.elsewhere)} of its layers run elsewhere: {names}"
        return (
            f"{known}; {fallback}" if known else f"TensorRT builds no plan for the DLA; {fallback}"
        )
    reason, reason_again = (
        known or _refusal(built) or _error(first),
        explain(again) or _error(again),
    )
    if reason and reason_again and reason != reason_again:
        return f"{reason_again}; without GPU fallback: {reason}"
    if reason or reason_again:
        return reason or reason_again
    last = text_of(lines[-1]) if lines else "it says nothing"
    return f"TensorRT builds no plan; its last line: {last}"


def _refusal(built: Built) -> str:
    """Return what TensorRT keeps off the DLA as a reason, "" if nothing."""
    if not built.refused:
        return ""
    return (
        f"TensorRT does not run {len(built.refused)} of its layers on the DLA, first "
        f"{built.refused[0]!r}; keep it off with `tandem build --force-gpu`, and report it: "
        "the rule table is wrong"
    )


def _error(lines: list[str]) -> str:
    error = last_error(lines)
    return f"TensorRT builds no plan: {error}" if error else ""


def _write(path: Path, data: memoryview) -> str:
    """Write a plan and return its SHA-256. Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    main(sys.argv)
