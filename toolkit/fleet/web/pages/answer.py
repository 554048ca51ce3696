"""What a device can be asked, and its answer: lines of its log, a picture, what it reports."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass

from device.protocol.documents import CommandState
from toolkit.errors import RolloutError
from toolkit.fleet.server.history import printable
from toolkit.fleet.web.frame import View, csrf_slot, part
from toolkit.html.markup import Html, join, markup, paragraph, preformatted

# Operation -> the text of its button and its arguments.
BUTTONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "log": ("Last lines of its log", ("lines=50",)),
    "snapshot": ("Picture of its camera", ("width=960",)),
    "report": ("Report now", ()),
    "restart": ("Restart its pipeline", ()),
}


@dataclass(frozen=True, slots=True)
class DeviceCommand:
    """An operation that a device shall do once, with its arguments KEY=VALUE."""

    device: str
    op: str
    words: tuple[str, ...] = ()


def command_of(device: str, op: str) -> DeviceCommand:
    """Return the command of a button. Raises RolloutError: there is no such button."""
    if op not in BUTTONS:
        raise RolloutError(f"{op!r} is none of {', '.join(BUTTONS)}")
    return DeviceCommand(device, op, BUTTONS[op][1])


def buttons(device: str) -> Html:
    """Return the form of what a device can be asked."""
    rows = "".join(
        f"<button name=op value={op}>{markup(text)}</button>" for op, (text, _) in BUTTONS.items()
    )
    return Html(
        f'<form method=post action="/devices/{part(device)}/commands" class=card>'
        f"<h2>Ask the device</h2>{csrf_slot()}<p class=buttons>{rows}</p></form>"
    )


def draw_answer(command: DeviceCommand, state: CommandState | None, wait_s: float) -> View:
    """Return the page of an answer."""
    back = Html(f'<p><a href="/devices/{part(command.device)}">Back to the device</a></p>')
    text, _ = BUTTONS[command.op]
    if state is None:
        answer = paragraph(
            f"{command.device} has not answered within {wait_s:g} s.", "notice waits"
        )
    elif state.status != "successful":
        answer = paragraph(f"{state.status}: {printable(state.reason)}", "notice bad")
    else:
        answer = _result(state.result)
    return View(f"{command.device}: {text}", Html(""), above=join([answer, back]))


def _result(result: Mapping[str, object]) -> Html:
    """Return a picture, lines, or what else was answered."""
    picture, lines = result.get("jpeg"), result.get("lines")
    if isinstance(picture, str) and _is_jpeg(picture):
        source = f"data:image/jpeg;base64,{markup(picture)}"
        return Html(f'<img class=snapshot alt="Picture of the camera" src="{source}">')
    if isinstance(lines, list):
        texts = [
            " ".join(str(one) for one in row.values()) if isinstance(row, dict) else str(row)
            for row in lines
        ]
        return Html(f"<div class=log>{preformatted(chr(10).join(map(printable, texts)))}</div>")
    rest = ", ".join(f"{key}: {value}" for key, value in result.items())
    return paragraph(f"Done. {printable(rest)}".strip(), "notice good")


def _is_jpeg(text: str) -> bool:
    try:
        return base64.b64decode(text, validate=True).startswith(b"\xff\xd8\xff")
    except (ValueError, binascii.Error):
        return False
