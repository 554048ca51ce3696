"""Is there a board at a serial port? Its agent answers an echo of SMP, and says its name."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from device.smp.cbor import Scalar, decode_map, encode
from device.smp.framing import ConsoleFraming
from device.smp.message import HEADER, READ
from device.smp.service import OS, TANDEM

if TYPE_CHECKING:
    import serial

NVIDIA = 0x0955  # the vendor in the USB ids of a Jetson's own port, and of its recovery mode
DEVICE_MODE = (0x7020, 0x7045)  # "Linux for Tegra" with its serial port, 0x7045 without the disk
BAUD = 115200
ANSWER_S = 1.0
WORD = "tandem"
_VERSION = 1 << 3


@dataclass(frozen=True, slots=True)
class SerialAnswer:
    """What a port answered; `device`: what the agent calls itself, "" if it does not say it."""

    sentence: str
    answers: bool = False
    device: str = ""


def jetson_ports() -> list[str]:
    """Return the serial ports of this host that are Jetsons, by their USB ids."""
    try:
        from serial.tools.list_ports import comports
    except ImportError:
        return []
    return sorted(
        port.device for port in comports() if port.vid == NVIDIA and port.pid in DEVICE_MODE
    )


def ask_serial(port: str, baud: int = BAUD) -> SerialAnswer:
    """Ask one port; whatever is wrong with it becomes the sentence."""
    import serial

    try:
        with serial.Serial(
            port, baud, timeout=0.05, write_timeout=ANSWER_S, exclusive=True
        ) as line:
            echo = _ask(line, OS, 0, {"d": WORD}, sequence=1)
            if echo is None or echo.get("r") != WORD:
                return SerialAnswer("no agent answers; [smp] of agent.toml opens the line")
            status = _ask(line, TANDEM, 0, {}, sequence=2) or {}
    except (OSError, serial.SerialException) as error:
        return SerialAnswer(f"cannot be opened: {error}")
    device = status.get("device")
    name = device if isinstance(device, str) and device.isprintable() else ""
    return SerialAnswer(f"{name or 'an agent'} answers", True, name)


def _ask(
    line: "serial.Serial", group: int, command: int, content: dict[str, Scalar], *, sequence: int
) -> dict[str, Scalar] | None:
    """Send one request in console framing; return the map of its answer, None without one."""
    body, framing = encode(content), ConsoleFraming()
    head = HEADER.pack(_VERSION | READ, 0, len(body), group, sequence, command)
    line.reset_input_buffer()
    line.write(framing.encode(head + body))
    until_s = time.monotonic() + ANSWER_S
    while time.monotonic() < until_s:
        for message in framing.feed(line.read(4096)):
            first, _, length, its_group, its_sequence, its_command = HEADER.unpack_from(message)
            answers = (its_group, its_sequence, its_command) == (group, sequence, command)
            if not answers or first & 7 != READ + 1 or length != len(message) - HEADER.size:
                continue
            try:
                return decode_map(message[HEADER.size :])
            except ValueError:
                return None
    return None
