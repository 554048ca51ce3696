"""What the agent and the process that checks a desired document say to each other.

The agent writes a `Request`, one line of JSON, then the parts of answers that the repository's
server sent: a line with `Part`, and its bytes. The child writes lines: files that it asks for, and
at last its verdict.
"""

from typing import Annotated, Any, Literal, Union

import msgspec
from msgspec import Meta

from device.protocol.documents import TufGet

MQTT_REPOSITORY = "mqtt:"  # the server behind the broker
DocumentKind = Literal["desired", "command"]
PART_BYTES = 64 * 1024
MAX_FILE_BYTES = 8 * 1024**2  # above every limit of a metadata file
MAX_DESIRED_BYTES = 64 * 1024


class _Value(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of the verdicts; the tag is kept in `kind`."""


class Trusted(_Value, frozen=True, kw_only=True, tag="trusted"):
    """The release may be installed. `custom`: what the repository's signed metadata say of it."""

    custom: dict[str, Any] = {}


class Refused(_Value, frozen=True, kw_only=True, tag="refused"):
    """It must not be installed. `again`: the cause may be mended without a new document."""

    reason: str
    again: bool = False


class Unverified(_Value, frozen=True, kw_only=True, tag="unverified"):
    """It is being checked, or what the check needs cannot be reached."""

    reason: str = ""


Verdict = Union[Trusted, Refused, Unverified]  # noqa: UP007  (read by msgspec on 3.10)

TRUSTED = Trusted()


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What shall be checked. `desired`: the text of the signed document, a command where `kind`
    says so; `timeout_s`: the longest time in all. `state_dir` is a folder of checks alone."""

    device: str
    desired: str
    trust_dir: str
    state_dir: str
    repository: str = MQTT_REPOSITORY
    timeout_s: float = 60.0
    kind: DocumentKind = "desired"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Announces `bytes` bytes of an answer: a part as it came over MQTT, its first line included.

    `id`: of the `TufGet`."""

    id: str
    number: Annotated[int, Meta(ge=0, lt=256)]
    bytes: Annotated[int, Meta(ge=0, le=2 * 1024**2)]


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the child: a file that it asks for, or its verdict."""

    get: TufGet | None = None
    verdict: Verdict | None = None


def encode_line(value: Request | Part | Line) -> bytes:
    """Return the value as one line of JSON."""
    return msgspec.json.encode(value) + b"\n"
