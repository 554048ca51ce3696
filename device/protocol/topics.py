"""The MQTT topics of a device, in one place. `{device}` is the id in agent.toml.

fleet/v1/{device}/state             retained, will: online | stopped | lost
fleet/v1/{device}/desired           retained: the release that the device shall run
fleet/v1/{device}/reported          retained: what it runs and how far an update is
fleet/v1/{device}/tele/beat         the device is alive: a signed counter, now and then
fleet/v1/{device}/blob/get          the device asks for chunks of a blob
fleet/v1/{device}/blob/{sha256}/{n} chunk n of a blob (n = "index": the chunk hashes)
fleet/v1/{device}/evt/update        CloudEvents: how an update ended
fleet/v1/{device}/evt/pipeline      CloudEvents: the pipeline's status changed
fleet/v1/{device}/tuf/get            the device asks for a file of the signed repository
fleet/v1/{device}/tuf/reply/{id}/{n} part n of the answer to the request of this id
fleet/v1/{device}/blob/{sha256}/{n}/{peer}  the same, from the server of this name (n = "d7": chunk
                                    7 as a difference; n = "none": the server has no such blob)
fleet/v1/~server/claim/{server}     retained, will: empty: a server of the fleet works
fleet/v1/{device}/cmd/{op}           retained: the device takes this operation
fleet/v1/{device}/cmd/{op}/{id}      retained: a command, answered in place with how far it is
fleet/v1/{device}/log/{source}       lines of the agent and of its pipeline, while asked for
fleet/v1/{device}/detections        what the pipeline saw, a message a frame
fleet/v1/{device}/stats             figures of the running pipeline
fleet/v1/{device}/status            retained, will, of the pipeline: online | stopped | offline
fleet/v1/{device}/events            new, update and end of tracked objects
fleet/v1/{device}/reload            what of a changed pipeline.toml was taken, or why nothing
fleet/v1/{device}/detect/set|state, threshold/set|state   what may be changed while it runs

Of several cameras each has detections, events, detect and threshold below its id.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

PREFIX = "fleet/v1"
PROVISION = "fleet/provision/v1"  # {id}/request, {id}/response: a new device's certificate
BLOB_GET_OF_ALL = f"{PREFIX}/+/blob/get"  # what a server of chunks subscribes to
SERVER_CLAIM = f"{PREFIX}/~server/claim"  # /{server}: one that works; no device's id has a `~`
TUF_GET_OF_ALL = f"{PREFIX}/+/tuf/get"  # what the server of metadata subscribes to
DeviceId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]


class FixedTopic:
    """A topic at a fixed path below a prefix: the attribute `prefix` of what has the topic."""

    def __init__(self, path: str, prefix: str = "root") -> None:
        self._path = path
        self._prefix = prefix

    def __get__(self, topics: object, _kind: type) -> str:
        """Return the topic of one device or camera."""
        return f"{getattr(topics, self._prefix)}/{self._path}"


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics of one device."""

    device: str

    @property
    def root(self) -> str:
        """The prefix of all topics of the device."""
        return f"{PREFIX}/{self.device}"

    state = FixedTopic("state")  # whether the agent is online, stopped or lost
    desired = FixedTopic("desired")  # the desired state
    reported = FixedTopic("reported")  # the reported state
    beat = FixedTopic("tele/beat")  # says that the agent is alive
    blob_get = FixedTopic("blob/get")  # requests of the device for chunks
    tuf_get = FixedTopic("tuf/get")  # requests of the device for files of the signed repository
    tuf_replies = FixedTopic("tuf/reply/+/+")  # all parts of all answers to these requests
    detections = FixedTopic("detections")  # detections of the running pipeline
    stats = FixedTopic("stats")  # figures of the running pipeline
    commands = FixedTopic("cmd/+/+")  # all commands, and how far they are
    # All chunks of all blobs, with and without the name of a server.
    chunks = FixedTopic("blob/+/+/#")

    def tuf_reply(self, request: str, part: int | str) -> str:
        """The topic of one part of the answer to a request."""
        return f"{self.root}/tuf/reply/{request}/{part}"

    def command(self, op: str, command_id: str) -> str:
        """The topic of one command."""
        return f"{self.root}/cmd/{op}/{command_id}"

    def capability(self, op: str) -> str:
        """Says that the device takes an operation."""
        return f"{self.root}/cmd/{op}"

    def log(self, source: str) -> str:
        """Lines of the agent or of its pipeline."""
        return f"{self.root}/log/{source}"

    def event(self, name: str) -> str:
        """Events of one sort: update, pipeline."""
        return f"{self.root}/evt/{name}"

    def chunk(self, sha256: str, part: int | str, peer: str) -> str:
        """The topic of one chunk of a blob from a server; part is its number or "index"."""
        return f"{self.root}/blob/{sha256}/{part}/{peer}"


@dataclass(frozen=True, slots=True)
class PipelineTopics:
    """The topics of one camera of a pipeline. `prefix`: that of the device, `camera`: the id of the
    source, empty where there is only one."""

    prefix: str
    camera: str = ""

    @property
    def root(self) -> str:
        """The prefix of the camera's topics."""
        return f"{self.prefix}/{self.camera}" if self.camera else self.prefix

    # Whether the pipeline publishes: online, stopped or offline; one for all cameras.
    status = FixedTopic("status", "prefix")
    detections = FixedTopic("detections")  # what each frame shows
    events = FixedTopic("events")  # the lives of objects: new, update, end
    stats = FixedTopic("stats", "prefix")  # figures; one for all cameras
    # What of a changed pipeline.toml was taken; one for all cameras.
    reload = FixedTopic("reload", "prefix")
    detect_set = FixedTopic("detect/set")  # asks to begin or stop detection: ON or OFF
    detect_state = FixedTopic("detect/state")  # whether detection runs: ON or OFF
    threshold_set = FixedTopic("threshold/set")  # asks for a least score, 0 to 1
    threshold_state = FixedTopic("threshold/state")  # the least score, 0 to 1
