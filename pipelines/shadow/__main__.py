"""`python -m pipelines.shadow`: a new release on the frames of the one that runs.

A process of its own with the lowest priority: whatever it does, the running pipeline goes on. Its
messages are lines of `device.protocol.messages`, as those of a pipeline.
"""

from device.start.isolation import drop_working_directory
from device.start.packages import claim

drop_working_directory()
claim()

# ruff: noqa: E402
import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from device.engine.file import Engine
from device.errors import TandemError
from device.protocol.messages import ChildMessage, Failure
from device.runtime.session import Session
from device.update.bundle import PIPELINE
from pipelines.message_channel import claim_stdout

_NICE = 19
_OOM_SCORE = "1000"  # the kernel ends it before anything else


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare until the time is over; return the exit status."""
    options = make_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICE)
    with contextlib.suppress(OSError):  # only Linux has it
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    emit = claim_stdout(lambda: os._exit(1))
    try:
        _compare(options, emit)
    except (TandemError, ValueError) as error:
        emit(Failure(message=str(error)))
        return 1
    return 0


def _compare(options: argparse.Namespace, emit: Callable[[ChildMessage], None]) -> None:
    # Here, so that a missing OpenCV is a Failure message too.
    from pipelines.config import load_pipeline
    from pipelines.open_models import bundle_files, open_models
    from pipelines.shadow.compare import Candidate, Limits, compare_live, message_of
    from pipelines.stages.fit import check_engines
    from pipelines.vision import cv2

    def open_session(engine: Engine, dla_core: int | None, turn: int | None) -> Session:
        return Session(engine, profile=options.profile, dla_core=dla_core, turn=turn)

    cv2.setNumThreads(1)
    config = load_pipeline(options.bundle / PIPELINE)
    limits = Limits(options.seconds, options.frames, options.timeout, options.max_hz)
    with ExitStack() as stack:
        models = open_models(config, bundle_files(config, options.bundle), stack, open_session)
        check_engines(config, {name: model.facts for name, model in models.items()})
        candidate = Candidate(config, models[config.first.name])
        stack.callback(candidate.close)
        candidate.warm_up()
        emit(message_of(compare_live(candidate, options.tap, limits, emit), done=True))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.shadow",
        description="Run the model of an unpacked bundle on the frames of a running pipeline.",
    )
    parser.add_argument("--bundle", type=Path, required=True, metavar="DIR")
    parser.add_argument("--profile", required=True, metavar="NAME")
    parser.add_argument(
        "--tap", type=Path, required=True, metavar="FILE", help="socket of the running pipeline"
    )
    parser.add_argument("--seconds", type=float, required=True, metavar="S")
    parser.add_argument("--frames", type=int, default=1, metavar="N", help="the least")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S")
    parser.add_argument("--max-hz", type=float, default=10.0, metavar="HZ")
    return parser


if __name__ == "__main__":
    sys.exit(main())
