"""The errors of the host side; see `device.errors` for the form of their messages."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from device.errors import TandemError, shortened


class ImportModelError(TandemError):
    """A model file cannot be read, or holds something that Tandem cannot handle."""


class PlanError(TandemError):
    """A model cannot be placed on the processors of a profile."""


class BuildError(TandemError):
    """An engine cannot be built from a model, a profile and a calibration table."""


class NetworkError(TandemError):
    """A layer does not fit the network that it is added to."""


class BenchError(TandemError):
    """An engine cannot be measured as asked."""


class DemoDataError(TandemError):
    """The model or the pictures of the demo are not installed."""


class InferError(TandemError):
    """A model or an engine cannot be run on the inputs that were asked for."""


class CompareError(TandemError):
    """Two models, engines or saved outputs cannot be compared."""


class FleetError(TandemError):
    """The folder, keys, certificates or store of a fleet cannot be used as asked."""


class WorkersError(TandemError):
    """Workers cannot be reached, or cannot do what they are given."""


class RegistryError(TandemError):
    """A registry of bundles cannot be reached, or does not give or take what was asked."""


class NotComparedError(TandemError):
    """`tandem compare` could not run, whose status 1 says that two sides differ."""

    exit_status = 2


class GuessError(TandemError):
    """It cannot be said how a model is fed and read."""


class SurgeonError(TandemError):
    """A model cannot be cut or reduced as asked."""


class PluginError(TandemError):
    """A plugin cannot be loaded, or does not do what it says."""


class RolloutError(TandemError):
    """A rollout cannot be started or changed as asked, or the fleet's store cannot be used."""


class BoardError(TandemError):
    """A board cannot be set up or looked after as asked."""


@contextmanager
def about(model: str) -> Iterator[None]:
    """Begin the messages of errors that do not name the model with its name."""
    try:
        yield
    except TandemError as err:
        if model in str(err):
            raise
        raise type(err)(f"{model}: {err}") from err


def first_line(err: BaseException) -> str:
    """Return the message of a library's error without source paths and C++ signatures."""
    text = next((line.strip() for line in str(err).splitlines() if line.strip()), "")
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    if match := _CPP_PLACE.search(text):
        text = text[: match.start()] + _after_signature(text[match.end() :])
    return shortened(re.sub(r"\s+", " ", text).strip()) or type(err).__name__


def printable(name: str | bytes) -> str:
    """Return a name from a model as one short line: damaged ones hold line ends, or whole files.

    protobuf gives a string that is no UTF-8 as bytes.
    """
    text = name if isinstance(name, str) else name.decode(errors="backslashreplace")
    line = text if text.isprintable() else repr(text)[1:-1]
    return line if len(line) <= LONGEST_NAME else f"{line[:LONGEST_NAME]}..."


LONGEST_NAME = 100  # characters of a name that is no name of ONNX
_CPP_PLACE = re.compile(r"/\S+\.(?:cc|cpp|h|hpp):\d+:? ")


def _after_signature(text: str) -> str:
    """Drop the C++ function that a message begins with, up to its balanced closing bracket."""
    message = re.sub(r"^.*Assertion `.*` failed: ", "", text)
    if message != text:
        return message
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == ")" and depth == 0 and text[index + 1 : index + 2] != "(":
            return re.sub(r"^ (const )?(\[with [^]]*\] )?", "", text[index + 1 :])
    return text
