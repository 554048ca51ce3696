"""TensorRT's known refusals of a DLA segment, as one sentence and a fix.

Sources: issue threads of TensorRT, DeepStream-Yolo, jetson_dla_tutorial and ultralytics, where
these lines were posted.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """A line of TensorRT's log: its pattern, what it means (with the pattern's groups), the fix."""

    pattern: str
    meaning: str
    fix: str


MESSAGES: tuple[Message, ...] = (
    Message(
        r"Cannot create DLA engine, (\d+) not available",
        "there is no DLA core {0} here",
        "build for the profile of this module",
    ),
    Message(
        r"DLA supports only (\d+) subgraphs per DLA core",
        "the core holds {0} loadables already",
        "stop other programs that use the DLA, or build with fewer DLA segments",
    ),
    Message(
        r"(?:Layer )?'?([^\s']+)'? ?\([^)]*\): Unsupported on DLA",
        "TensorRT does not run layer {0} on the DLA",
        "keep it off with `tandem build --force-gpu`, and report it: the rule table is wrong",
    ),
    Message(
        r"Validation failed for DLA layer:? ?(\S+)?",
        "the DLA's compiler refuses layer {0}",
        "keep it off with `tandem build --force-gpu`, and report it: the rule table is wrong",
    ),
    Message(
        r"DLA only supports (.+)",
        "the DLA only supports {0}",
        "keep it off with `tandem build --force-gpu`, and report it: the rule table is wrong",
    ),
    Message(
        r"Could not find any implementation for node (\S+)",
        "TensorRT finds no implementation of {0} within the limits",
        "free memory on the board and run `tandem-agent prepare --again`",
    ),
    Message(
        r"Failure to submit program to DLA engine",
        "the DLA's driver does not take the loadable",
        "reboot the board, and free memory: loadables need it in one piece",
    ),
    Message(
        r"Calibration table does not match calibrator algorithm type",
        "a calibration cache is of another algorithm",
        "build the engine again",
    ),
    Message(
        r"Missing scale and zero-point for tensor (\S+?),",
        "tensor {0} has no range",
        "calibrate the model again, and build with that table",
    ),
    Message(
        r"(?:out of memory|OutOfMemory|NvMapMemAlloc\w* error)",
        "there is not enough memory to build",
        "stop other programs, or add swap while the board prepares",
    ),
    Message(
        r"libnvdla_compiler\.so",
        "the DLA's compiler cannot be loaded",
        "install nvidia-l4t-dla-compiler",
    ),
)


def explain(log: Iterable[str]) -> str | None:
    """Return what a log's first known refusal means and what to do; None if none is known."""
    for line in log:
        for message in MESSAGES:
            match = re.search(message.pattern, line)
            if match:
                groups = [group or "(unnamed)" for group in match.groups()]
                return f"{message.meaning.format(*groups)}; {message.fix}"
    return None
