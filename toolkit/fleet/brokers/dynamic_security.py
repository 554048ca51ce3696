"""Ends what a revoked device has open at mosquitto, by its plugin dynamic-security.

mosquitto reads its access list and its revocation list for messages and for new connections; one
that is open stays open. The plugin takes commands on a topic, from the server's certificate alone.
Here it knows revoked devices only: it denies them everything and disconnects them. For all others
the access list decides.
"""

import queue
import secrets
import time
from collections.abc import Callable, Sequence
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
    return _command(settings, device, ("createClient", "disableClient"), _is_denied)


def readmit_device(settings: LinkSettings, device: str) -> str:
    """End the connections of a revoked device, then let its name be used again; return "" if both
    are done, otherwise why not."""
    return disconnect_device(settings, device) or _command(
        settings, device, ("deleteClient",), _is_unknown
    )


def _command(
    settings: LinkSettings, device: str, words: Sequence[str], is_done: Callable[["_Answer"], bool]
) -> str:
    """Have the plugin do something with a device; return why it is not done."""
    where = f"the broker at {settings.host}:{settings.port}"
    mark = secrets.token_hex(8)
    row = {"username": device, "correlationData": mark, "roles": [{"rolename": ROLE}]}
    commands = [{"command": word, **row} for word in (*words, "getClient")]
    events: queue.Queue[LinkEvent] = queue.Queue()
    link = Link(replace(settings, subscriptions=((RESPONSE, 1),)), events.put)
    link.start()
    try:
        answer = _ask(link, events, commands, mark)
    finally:
        link.close()
    if isinstance(answer, str):
        return (
            answer or f"{where} does not answer on {CONTROL}: it runs with an earlier configuration"
        )
    return "" if is_done(answer) else f"{where} did not {words[-1]} {device}: {answer.error}"


def _ask(
    link: Link, events: "queue.Queue[LinkEvent]", commands: Sequence[object], mark: str
) -> "_Answer | str":
    """Return what the plugin says of the device in the end, or why it says nothing."""
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
        elif (answer := _answer_in(event, mark)) is not None:
            return answer
    return ""


def _answer_in(message: Message, mark: str) -> _Answer | None:
    """Return the answer to `getClient` in a message, None without it."""
    try:
        answers = msgspec.json.decode(message.payload, type=_Answers).responses
    except msgspec.MsgspecError:
        return None
    ours = (row for row in answers if (row.command, row.correlationData) == ("getClient", mark))
    return next(ours, None)


def _is_denied(answer: _Answer) -> bool:
    client = answer.data.get("client", {})
    roles = client.get("roles")
    return (
        client.get("disabled") is True and isinstance(roles, list) and {"rolename": ROLE} in roles
    )


def _is_unknown(answer: _Answer) -> bool:
    return answer.error == "Client not found"
