"""Ends what a revoked device has open at mosquitto, by its plugin dynamic-security.

mosquitto reads its access list and its revocation list for messages and for new connections; one
that is open stays open. The plugin takes commands on a topic, from the server's certificate alone.
Here it knows revoked devices only: it denies them everything and disconnects them. For all others
the access list decides.
"""

import queue
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from device.protocol.mqtt import Link, LinkDown, LinkEvent, LinkSettings, LinkUp, Message

CONTROL = "$CONTROL/dynamic-security/v1"
RESPONSE = f"{CONTROL}/response"
ROLE = "revoked"
ANSWER_S = 10.0
_DENIED = ("publishClientSend", "publishClientReceive", "subscribePattern")


def plugin_state(revoked: Sequence[str]) -> bytes:
    """Return what the plugin reads at its start."""
    denied = [{"acltype": kind, "topic": "#", "priority": 0, "allow": False} for kind in _DENIED]
    default = dict.fromkeys(("publishClientSend", "publishClientReceive", "subscribe"), False)
    document = {
        "defaultACLAccess": {**default, "unsubscribe": True},
        "clients": [
            {"username": device, "disabled": True, "roles": [{"rolename": ROLE}]}
            for device in revoked
        ],
        "roles": [{"rolename": ROLE, "acls": denied}],
    }
    return msgspec.json.format(msgspec.json.encode(document))


class _Answer(msgspec.Struct):
    command: str
    correlationData: str = ""  # noqa: N815  (the plugin's name)
    data: dict[str, dict[str, object]] = {}
    error: str = ""


class _Answers(msgspec.Struct):
    responses: list[_Answer]


def disconnect_device(settings: LinkSettings, device: str) -> str:
    """End the rights and connections of a device, and ask whether they have; return "" if so.

    Otherwise it returns why not. `settings`: a connection with the server's certificate.
    """
    events: queue.Queue[LinkEvent] = queue.Queue()
    link = Link(replace(settings, subscriptions=((RESPONSE, 1),)), events.put)
    link.start()
    try:
        return _disable(link, events, device, f"the broker at {settings.host}:{settings.port}")
    finally:
        link.close()


def _disable(link: Link, events: "queue.Queue[LinkEvent]", device: str, where: str) -> str:
    mark = secrets.token_hex(8)
    row = {"username": device, "correlationData": mark}
    commands = [
        {"command": "createClient", "roles": [{"rolename": ROLE}], **row},
        {"command": "disableClient", **row},  # ends its connections
        {"command": "getClient", **row},
    ]
    until_s = time.monotonic() + ANSWER_S
    while (remaining_s := until_s - time.monotonic()) > 0.0:
        try:
            event = events.get(timeout=remaining_s)
        except queue.Empty:
            break
        if isinstance(event, LinkDown):
            return event.reason
        if isinstance(event, LinkUp):
            link.publish(CONTROL, msgspec.json.encode({"commands": commands}), qos=1)
        elif (verdict := _verdict(event, mark)) is not None:
            return "" if verdict else f"{where} did not disable the device {device}"
    return f"{where} does not answer on {CONTROL}: it runs with an earlier configuration"


def _verdict(message: Message, mark: str) -> bool | None:
    """Return whether the device is disabled, None if the message does not say so."""
    try:
        answers = msgspec.json.decode(message.payload, type=_Answers).responses
    except msgspec.MsgspecError:
        return None
    for answer in answers:
        if answer.command == "getClient" and answer.correlationData == mark:
            client = answer.data.get("client", {})
            return client.get("disabled") is True and {"rolename": ROLE} in _roles(client)
    return None


def _roles(client: dict[str, object]) -> list[object]:
    roles = client.get("roles")
    return roles if isinstance(roles, list) else []
