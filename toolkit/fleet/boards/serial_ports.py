"""Is there a board at a serial port? Its agent answers SMP, and says its name."""

from dataclasses import dataclass

from device.errors import TandemError
from device.smp.message import READ

NVIDIA = 0x0955  # the vendor in the USB ids of a Jetson's own port, and of its recovery mode
DEVICE_MODE = (0x7020, 0x7045)  # "Linux for Tegra" with its serial port, 0x7045 without the disk
BAUD = 115200


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
    from toolkit.fleet.transports.smp_client import TANDEM, SmpClient
    from toolkit.fleet.transports.smp_links import SerialLine

    client = SmpClient(SerialLine(port, baud, "console"))
    try:
        client.connect(tries=1)  # most ports have a login, which never answers
        device = client.ask(READ, TANDEM, 0, {}).get("device")
    except TandemError as error:
        return SerialAnswer(str(error))
    finally:
        client.close()
    name = device if isinstance(device, str) and device.isprintable() else ""
    return SerialAnswer(f"{port}: {name or 'an agent'} answers", True, name)
