"""The documents that a device and its operator exchange over MQTT (see `device.protocol.topics`).

All are JSON. Unknown keys are let through, so that an older agent reads a newer host; the `format`
of `Desired` is what tells a document that cannot be understood.
"""

from typing import Annotated, Any, Literal, TypeVar, Union

import msgspec
from msgspec import Meta

DOCUMENT_FORMAT = 2  # of what is written; 2: the blob may be cut by its content
CHOSEN_FORMAT = (
    3  # of what chooses a slot or waits for a commit, which older agents must not ignore
)
READABLE_FORMATS = (1, 2, 3)
CHUNK_BYTES = 64 * 1024
MAX_BLOB_BYTES = 2 * 1024**3
MAX_CHUNKS = 32 * 1024
MAX_INDEX_BYTES = 1024**2  # one message for every broker
MAX_CHUNKS_A_REQUEST = 256
MAX_BASES = 2  # a device has two slots
# Of a report: what is over these is cut by its agent, and refused by its reader.
MAX_WORDS = 200  # characters of a name
MAX_SENTENCE = 2000  # characters of a reason
MAX_SENTENCES = 32
MAX_LABELS = 64
MAX_BUNDLES = 8
MAX_BEAT_S = 86400.0  # between two beats

Amount = Annotated[int, Meta(ge=0, le=10**15)]
Counter = Annotated[int, Meta(ge=0, le=2**62)]
Words = Annotated[str, Meta(max_length=MAX_WORDS)]
Sentence = Annotated[str, Meta(max_length=MAX_SENTENCE)]
Sentences = Annotated[tuple[Sentence, ...], Meta(max_length=MAX_SENTENCES)]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
# Printable: names end up in logs and on terminals.
Text = Annotated[str, Meta(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
PeerId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{0,32}\Z")]
Phase = Literal[
    "idle",
    "verifying",
    "downloading",
    "staging",
    "trial",
    "postponed",
    "live",
    "rolled_back",
    "refused",
]
AgentState = Literal["online", "stopped", "lost"]
PipelineStatus = Literal[
    "stopped", "starting", "running", "degraded", "stalled", "restarting", "failed"
]


CommandName = Annotated[str, Meta(pattern=r"^[a-z_]{1,32}\Z")]
CommandId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
CommandArgument = Union[str, int, float, bool]  # noqa: UP007  (read by msgspec on 3.10)
CommandStatus = Literal["init", "executing", "successful", "failed"]


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the documents: frozen values."""


class BlobSpec(_Document, frozen=True, kw_only=True):
    """A blob that is fetched in chunks of at most `chunk_bytes`, which an index lists.

    `chunk_format` 1: all chunks but the last have `chunk_bytes`; 2: they are cut by the content
    (`device.update.chunk_table` has both layouts of the index).
    """

    sha256: Sha256
    bytes: Annotated[int, Meta(ge=1, le=MAX_BLOB_BYTES)]
    chunk_bytes: Annotated[int, Meta(ge=4096, le=256 * 1024)]
    index_sha256: Sha256
    chunk_format: Annotated[int, Meta(ge=1)] = 1


class ReleaseSpec(_Document, frozen=True, kw_only=True):
    """The bundle that a device shall run and how it is fetched.

    `target`: its path in the signed repository; empty for one that is not signed. `sources`: where
    the bundle may be fetched, in this order, before those of agent.toml (`device.update.sources`);
    empty: those of agent.toml alone.
    """

    name: Text
    version: Text
    profile: Text
    blob: BlobSpec
    target: Text = ""
    sources: Annotated[tuple[Text, ...], Meta(max_length=8)] = ()


class InstallPolicy(_Document, frozen=True, kw_only=True):
    """What a release must show on the device before it is committed; None: as agent.toml says.

    `min_golden_agreement`, `min_shadow_agreement`: shares from 0 to 1 of outputs that agree with
    what the bundle recorded, and of live frames on which the old and the new engine agree.
    `shadow_s`: so long both engines run on live frames; 0: not at all. `max_bytes_per_s` limits the
    download. `not_before`, `not_after`: the maintenance window in the device's local time, "HH:MM".
    `slot`: the one that the release is for, empty for whichever is idle. `manual`: a release that
    works is not committed by the agent, but when somebody says so; a restart rolls it back.
    """

    confirm_after_s: Annotated[float, Meta(gt=0.0, le=86400.0)] | None = None
    max_latency_p95_ms: Annotated[float, Meta(gt=0.0)] | None = None
    max_error_rate: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    max_temperature_c: float | None = None
    min_golden_agreement: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    min_shadow_agreement: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    shadow_s: Annotated[float, Meta(ge=0.0, le=86400.0)] = 0.0
    max_bytes_per_s: Annotated[int, Meta(ge=1024)] | None = None
    not_before: str = ""
    not_after: str = ""
    slot: Literal["", "a", "b"] = ""
    manual: bool = False


class Desired(_Document, frozen=True, kw_only=True):
    """The desired state. A new `request` tries a release again that was refused, with `retry` also
    one that was rolled back.

    `device`, `counter` and `expires` (RFC 3339, UTC) bind a signed document to one device and to
    its time: a counter below the last one is a replay. `leave`: the device shall run the version of
    the agent before `release`, which is one of the agent.
    """

    format: int
    request: Annotated[str, Meta(min_length=1, max_length=64)]
    release: ReleaseSpec
    retry: bool = False
    device: str = ""
    counter: Annotated[int, Meta(ge=0)] = 0
    expires: str = ""
    policy: InstallPolicy = InstallPolicy()
    leave: bool = False


class Running(_Document, frozen=True, kw_only=True):
    """The release that the device runs, by slot."""

    slot: Words
    sha256: Words
    name: Words
    version: Words


class PipelineReport(_Document, frozen=True, kw_only=True):
    """The status of the pipeline process; `reason` says why it does not run.

    `since`: when it became degraded or stalled, ISO 8601 in UTC. `load`: the step that a hot or
    slow board has made the pipeline take, and why. `degraded`: segments that run on another
    processor than the engine was planned for, and why; the status is as it is.
    """

    status: PipelineStatus
    reason: Sentence = ""
    since: Words = ""
    load: Sentence = ""
    degraded: Sentences = ()


class Update(_Document, frozen=True, kw_only=True):
    """The progress of the desired release. `waits_for_commit`: it works, and somebody has to say
    that it stays (`InstallPolicy.manual`)."""

    phase: Phase
    sha256: Words = ""
    request: Words = ""
    received_bytes: Amount = 0
    total_bytes: Amount = 0
    reason: Sentence = ""
    waits_for_commit: bool = False


class DeviceFacts(_Document, frozen=True, kw_only=True):
    """What the device is, for rollouts that choose by capability. Empty or 0: not known.

    `bundles`: the SHA-256 of the releases in its slots, which need no download. `python`, `machine`
    (as `uname -m` says it), `glibc`, `l4t`: what releases of the agent are compared with.
    """

    module: Words = ""
    jetpack: Words = ""
    tensorrt: Words = ""
    dla_cores: Amount = 0
    memory_mb: Amount = 0
    free_mb: Amount = 0
    power_mode: Words = ""
    labels: Annotated[dict[Words, Words], Meta(max_length=MAX_LABELS)] = {}
    bundles: Annotated[tuple[Words, ...], Meta(max_length=MAX_BUNDLES)] = ()
    python: Words = ""
    machine: Words = ""
    glibc: Words = ""
    l4t: Words = ""


class AgentReport(_Document, frozen=True, kw_only=True):
    """The versions of the agent on the device, VERSION-HASH; empty: the installed one, or none.

    `running`: in this process. `trial`: it is being tried. `failed`, `reason`: the last one that
    was given up, and why.
    """

    running: Words = ""
    previous: Words = ""
    trial: Words = ""
    failed: Words = ""
    reason: Sentence = ""


class Measured(_Document, frozen=True, kw_only=True):
    """What the device measured of a release since it was started, for the gates of a rollout.

    `first_latency_ms`: of the first frame that went through every stage; 0: none yet. Agreements
    are shares from 0 to 1, None: not measured.
    """

    sha256: Sha256
    frames: Amount = 0
    errors: Amount = 0
    fps: float = 0.0
    first_latency_ms: float = 0.0
    latency_p50_ms: float = 0.0
    latency_p95_ms: float = 0.0
    temperature_c: float | None = None
    golden_agreement: float | None = None
    shadow_agreement: float | None = None
    shadow_frames: Amount = 0


class Reported(_Document, frozen=True, kw_only=True):
    """The reported state; retained. `problems`: sentences on what is wrong with the device.

    `counter`: above that of every report before, also of earlier processes; 0: of an older agent.
    `beat_s`: a beat or another report comes at least so often; 0: of an agent without beats.
    `versions`: of the agent; None: of one that takes no releases of the agent from a fleet.
    """

    agent: Words
    profile: Words
    dev: bool
    warning: Sentence
    session: int
    running: Running | None
    pipeline: PipelineReport
    update: Update
    problems: Sentences = ()
    facts: DeviceFacts = DeviceFacts()
    measured: Measured | None = None
    counter: Counter = 0
    beat_s: Annotated[float, Meta(ge=0.0, le=MAX_BEAT_S)] = 0.0
    versions: AgentReport | None = None


class Beat(_Document, frozen=True, kw_only=True):
    """The agent is alive; not retained, and signed as reports are.

    `counter`: one sequence with that of reports. `at`: the device's clock, RFC 3339; it is only
    shown, as clocks of boards are wrong.
    """

    counter: Annotated[int, Meta(ge=1, le=2**62)]
    at: Words = ""


class Command(_Document, frozen=True, kw_only=True):
    """What a device shall do once. `counter` and `expires` (RFC 3339, UTC) bind it to its time: one
    with a counter that is not above that of the last command is a replay.

    `op` and `id` are those of its topic, `arguments` those of the operation.
    """

    op: CommandName
    id: CommandId
    device: str
    counter: Annotated[int, Meta(ge=0)]
    expires: str
    arguments: dict[str, CommandArgument] = {}
    status: Literal["init"] = "init"


class CommandState(_Document, frozen=True, kw_only=True):
    """How far a command is: the device writes it in the place of the command, retained.

    `reason`: why it failed. `refused`: it failed because of this device or its state now, not
    because of what was asked. `at`: RFC 3339, UTC. `result`: what the operation gives.
    """

    status: CommandStatus
    op: CommandName
    id: CommandId
    at: str = ""
    reason: str = ""
    refused: bool = False
    result: dict[str, Any] = {}


class LogLine(_Document, frozen=True, kw_only=True):
    """A line of the agent's log, or one that its pipeline has printed.

    `left_out`: lines before it that were too many.
    """

    at: str
    level: str
    text: str
    left_out: Amount = 0


class Signature(_Document, frozen=True, kw_only=True):
    """A signature: the id of the key and the signature, both in hexadecimal."""

    keyid: str
    sig: str


class Signed(_Document, frozen=True, kw_only=True):
    """A signed document: `payload` is its JSON text, whose UTF-8 bytes are what is signed."""

    payload: str
    signatures: tuple[Signature, ...]


class SignedCommand(Signed, frozen=True, kw_only=True):
    """A signed command as it is published: its status can be read without the payload."""

    status: Literal["init"] = "init"


class StateDocument(_Document, frozen=True, kw_only=True):
    """Birth, will and farewell. A `lost` of another session than the last birth is stale."""

    state: AgentState
    session: int


class BlobGet(_Document, frozen=True, kw_only=True):
    """A request of the device for the index or for chunks of a blob.

    `peer`: the one server that shall answer, empty for any. `bases`: the SHA-256 of bundles that
    the device has; a server that has one too may send a chunk as its difference from it.
    """

    sha256: Sha256
    index: bool = False
    chunks: tuple[Annotated[int, Meta(ge=0, lt=MAX_CHUNKS)], ...] = ()
    peer: PeerId = ""
    bases: Annotated[tuple[Sha256, ...], Meta(max_length=MAX_BASES)] = ()


class TufGet(_Document, frozen=True, kw_only=True):
    """A request of the device for a file of the signed repository, such as
    `metadata/3.root.json`."""

    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{1,32}\Z")]
    path: Annotated[str, Meta(min_length=1, max_length=1024)]


class TufReply(_Document, frozen=True, kw_only=True):
    """The first line of a part of an answer; the bytes of the part follow it.

    `status`: 200, 404 if there is no such file, 400 for a path that is not served, 500 if it could
    not be read. `parts`: how many the answer has.
    """

    status: int
    parts: Annotated[int, Meta(ge=1, le=256)] = 1


def format_of(policy: InstallPolicy) -> int:
    """Return the format of a desired document: the oldest whose readers understand the policy."""
    return CHOSEN_FORMAT if policy.slot or policy.manual else DOCUMENT_FORMAT


D = TypeVar("D", bound=msgspec.Struct)


def encode(document: msgspec.Struct) -> bytes:
    """Return the document as JSON."""
    return msgspec.json.encode(document)


def decode(payload: bytes, kind: type[D]) -> D:
    """Return the document in a payload; ValueError says what is wrong with it."""
    try:
        return msgspec.json.decode(payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error) or "it is nested too deep") from error
