"""Write the AsyncAPI description of all MQTT topics, made from the code: docs/schema/asyncapi.json.

python -m scripts.asyncapi --write
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from device.agent.event_sender import UpdateEnded
from device.enrol.request import EnrolRequest, EnrolResponse, request_topic, response_topic
from device.protocol import documents
from device.protocol.messages import Failure, Heartbeat, Ready, Reload, Result, Shadow, Stats
from device.protocol.topics import SERVER_CLAIM, PipelineTopics, Topics
from pipelines.sinks.events import Event
from pipelines.sinks.track_lifecycle import ObjectEvent
from toolkit.fleet.server.copy_guard import Claim

PATH = Path(__file__).parents[1] / "docs" / "schema" / "asyncapi.json"
TOPICS = Topics("{device}")
PIPELINE = PipelineTopics(TOPICS.root)
SWITCH = {"type": "string", "enum": ["ON", "OFF"]}
SCORE = {"type": "string", "pattern": r"^(0(\.\d+)?|1(\.0+)?)$"}
STATUS = {"type": "string", "enum": ["online", "stopped", "offline"]}
MESSAGES = (Stats, Ready, Result, Heartbeat, Reload, Shadow, Failure)
BYTES = {"type": "string", "format": "binary"}
Sender = Literal["device", "fleet", "operator", "claim"]


@dataclass(frozen=True, slots=True)
class Channel:
    """One topic: who sends what there. `payload`: a struct, one of several, or a JSON Schema."""

    name: str
    address: str
    sender: Sender
    payload: type[msgspec.Struct] | tuple[type[msgspec.Struct], ...] | dict[str, object]
    qos: int
    retain: bool
    summary: str
    parameters: tuple[str, ...] = ("device",)


CHANNELS: tuple[Channel, ...] = (
    Channel("state", TOPICS.state, "device", documents.StateDocument, 1, True,
            "Whether the agent is online, stopped or, as its will, lost."),
    Channel("desired", TOPICS.desired, "fleet", documents.Signed, 1, True,
            "The release that the device shall run: a signed Desired; bare on a bench."),
    Channel("reported", TOPICS.reported, "device",
            (documents.Reported, documents.Signed), 1, True,
            "What the device runs and how far an update is; signed where it has a key."),
    Channel("beat", TOPICS.beat, "device", (documents.Beat, documents.Signed), 1, False,
            "The device is alive; signed where it has a key."),
    Channel("chunkRequest", TOPICS.blob_get, "device", documents.BlobGet, 0, False,
            "Asks for chunks of a bundle."),
    Channel("chunk", TOPICS.chunk("{sha256}", "{part}", "{peer}"), "fleet", BYTES, 0, False,
            "A chunk, or the index of all.", ("device", "sha256", "part", "peer")),
    Channel("metadataRequest", TOPICS.tuf_get, "device", documents.TufGet, 1, False,
            "Asks for a file of the signed repository."),
    Channel("metadata", TOPICS.tuf_reply("{request}", "{part}"), "fleet", BYTES, 1, False,
            "A part of the file: a line of JSON (TufReply), then bytes.",
            ("device", "request", "part")),
    Channel("updateEvent", TOPICS.event("update"), "device", UpdateEnded, 1, False,
            "How an update ended: a CloudEvent."),
    Channel("pipelineEvent", TOPICS.event("pipeline"), "device", documents.PipelineReport, 1,
            False, "The pipeline's status changed: a CloudEvent."),
    Channel("capability", TOPICS.capability("{op}"), "device", {"type": "object"}, 1, True,
            "The device takes this operation: an empty object.", ("device", "op")),
    Channel("command", TOPICS.command("{op}", "{command}"), "operator",
            (documents.SignedCommand, documents.Command), 1, True,
            "What the device shall do once: a signed Command; bare on a bench.",
            ("device", "op", "command")),
    Channel("commandState", TOPICS.command("{op}", "{command}"), "device",
            documents.CommandState, 1, True,
            "How far a command is, in its place.", ("device", "op", "command")),
    Channel("log", TOPICS.log("{source}"), "device", documents.LogLine, 0, False,
            "Lines of the agent or its pipeline, while asked for.", ("device", "source")),
    Channel("stats", TOPICS.stats, "device", MESSAGES, 0, False,
            "Figures of the pipeline, and its other messages by `kind`."),
    Channel("status", PIPELINE.status, "device", STATUS, 1, True, "Whether the pipeline runs."),
    Channel("detections", PIPELINE.detections, "device", Event, 0, False, "What a frame shows."),
    Channel("events", PIPELINE.events, "device", ObjectEvent, 1, False,
            "New, update and end of tracked objects."),
    Channel("reload", PIPELINE.reload, "device", Reload, 1, False,
            "What of a changed pipeline.toml was taken, or why nothing."),
    Channel("detectSet", PIPELINE.detect_set, "operator", SWITCH, 1, False, "Look at frames."),
    Channel("detectState", PIPELINE.detect_state, "device", SWITCH, 1, True, "Whether it does."),
    Channel("thresholdSet", PIPELINE.threshold_set, "operator", SCORE, 1, False,
            "The least score."),
    Channel("thresholdState", PIPELINE.threshold_state, "device", SCORE, 1, True,
            "The least score that holds."),
    Channel("enrolRequest", request_topic("{request}"), "claim", EnrolRequest, 1, False,
            "A new device asks for a certificate.", ("request",)),
    Channel("enrolResponse", response_topic("{request}"), "fleet", EnrolResponse, 1, False,
            "The certificate, or why there is none.", ("request",)),
    Channel("claim", f"{SERVER_CLAIM}/{{server}}", "fleet", Claim, 1, True,
            "A server of the fleet works; empty, as its will: no longer.", ("server",)),
)  # fmt: skip

PARAMETERS = {
    "device": "`device` of its agent.toml.",
    "sha256": "Of the bundle, in hexadecimal.",
    "part": "A number, `dN` for chunk N as a difference, `index`, `end` or `none`.",
    "peer": "The server that sends.",
    "request": "Chosen by who asks.",
    "op": "An operation: restart, pipeline, snapshot, log, logs, report, reboot.",
    "command": "The id of the command, chosen by who gives it.",
    "source": "agent or pipeline.",
    "server": "Chosen by the server.",
}


def description() -> str:
    """Return the description as JSON."""
    structs = {kind: None for row in CHANNELS for kind in _structs(row)}
    extra = (documents.Desired, documents.TufReply)
    _, schemas = msgspec.json.schema_components(
        [*structs, *extra], ref_template="#/components/schemas/{name}"
    )
    page = {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Tandem devices over MQTT",
            "version": "1.0.0",
            "description": "Every topic of a device, of its fleet and of its pipeline. Keys that a "
            "reader does not know are ignored.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": {one.name: _channel(one) for one in CHANNELS},
        "operations": {one.name: _operation(one) for one in CHANNELS},
        "components": {"schemas": schemas},
    }
    return json.dumps(page, indent=1) + "\n"


def _structs(row: Channel) -> tuple[type[msgspec.Struct], ...]:
    if isinstance(row.payload, dict):
        return ()
    return row.payload if isinstance(row.payload, tuple) else (row.payload,)


def payload_schema(row: Channel) -> dict[str, object]:
    """Return the JSON Schema of a channel's payload; it refers to the components."""
    if isinstance(row.payload, dict):
        return row.payload
    references = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in _structs(row)]
    return {"oneOf": references} if len(references) > 1 else {**references[0]}


def _channel(row: Channel) -> dict[str, object]:
    return {
        "address": row.address,
        "summary": row.summary,
        "messages": {row.name: {"payload": payload_schema(row)}},
        "parameters": {name: {"description": PARAMETERS[name]} for name in row.parameters},
    }


def _operation(row: Channel) -> dict[str, object]:
    """Return who sends: the description is that of a device."""
    return {
        "action": "send" if row.sender in ("device", "claim") else "receive",
        "channel": {"$ref": f"#/channels/{row.name}"},
        "bindings": {"mqtt": {"qos": row.qos, "retain": row.retain, "bindingVersion": "0.2.0"}},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the description, or write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/schema/asyncapi.json")
    if parser.parse_args(arguments).write:
        PATH.write_text(description(), encoding="utf-8")
    else:
        print(description(), end="")


if __name__ == "__main__":
    main()
