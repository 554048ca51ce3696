"""A board behind a broker: what it reports, and `tandem deploy` to it alone."""

import queue
import threading
import time

from device.control.upload_request import BoardFacts
from device.errors import BrokerError
from device.protocol.control import Answer
from device.protocol.documents import Measured, Reported, Update
from device.protocol.mqtt import Link, LinkDown, LinkEvent, Message, queue_putter
from device.protocol.signed import open_reported
from device.protocol.topics import Topics
from toolkit.fleet.brokers.address import BrokerAddress
from toolkit.fleet.transports.checks import check_result
from toolkit.fleet.transports.delivery import Delivery
from toolkit.fleet.transports.deploy import DeployOptions, deploy
from toolkit.fleet.transports.device_deployment import DeployProgress
from toolkit.fleet.transports.transport import (
    OnProgress,
    Progress,
    RefusedError,
    TransportError,
)

REPORT_S = 20.0  # a retained report comes at once; a slow broker may take longer


class MqttBoard:
    """One device of a broker."""

    sent_bytes = 0
    measured: Measured | None = None
    shared = False

    def __init__(self, broker: BrokerAddress, device: str, timeout_s: float) -> None:
        """`timeout_s`: give the device up when it is silent for so long."""
        self.name = device
        self._broker = broker
        self._timeout_s = timeout_s

    def facts(self) -> BoardFacts:
        """Return what the device's retained report says."""
        reported = _read_report(self._broker, self.name)
        return BoardFacts(facts=reported.facts, answer=Answer(device=self.name, reported=reported))

    def send(self, delivery: Delivery, on_progress: OnProgress) -> None:
        """Nothing is sent yet: the device asks for what it lacks once the release is desired."""
        if delivery.erase:
            raise RefusedError(
                "what a board has received is not erased through a broker: leave out `tandem flash "
                "--erase-cache`, or flash over ssh:// or serial://"
            )

    def install(self, delivery: Delivery, on_progress: OnProgress) -> Update:
        """Deploy, and take the report at the end.

        The text of KeyboardInterrupt says what has become of the release: see
        `toolkit.fleet.transports.withdrawal`.
        """

        def show(progress: DeployProgress) -> None:
            received = progress.received_bytes
            on_progress(Progress(progress.phase, received, progress.total_bytes))

        (result,) = deploy(
            delivery,
            (self.name,),
            self._broker,
            DeployOptions(self._timeout_s),
            withdraw=True,
            on_progress=show,
        )
        self.sent_bytes, phase = result.sent_bytes, result.phase
        if phase == "superseded" or phase == "timeout":  # noqa: PLR1714  (mypy narrows by it)
            raise TransportError(f"{delivery.named} is not live on {self.name}: {result.reason}")
        update = Update(
            phase=phase,
            request=delivery.request,
            reason=result.reason,
            waits_for_commit=phase == "trial",
        )
        check_result(update, self.name, delivery)
        self.measured = _read_report(self._broker, self.name).measured
        return update

    def cancel(self, request: str) -> None:
        """A release that Ctrl-C stops was withdrawn while it was deployed."""

    def commit(self) -> Answer:
        """A broker carries desired releases, and nothing that commits one."""
        raise RefusedError(
            "nothing is committed through a broker: flash the same bundle again without `tandem "
            "flash --no-commit`, which keeps it, or use ssh:// or serial://"
        )

    def close(self) -> None:
        """There is nothing to end."""


def _read_report(broker: BrokerAddress, device: str) -> Reported:
    """Return the retained report of a device."""
    events: queue.Queue[LinkEvent] = queue.Queue(16)
    ended = threading.Event()
    client_id = f"tandem-flash-{threading.get_native_id()}"
    settings = broker.link_settings(client_id, Topics(device).reported)
    link = Link(settings, queue_putter(events, ended))
    link.start()
    until_s = time.monotonic() + REPORT_S
    try:
        while True:
            event = events.get(timeout=max(0.0, until_s - time.monotonic()))
            if isinstance(event, LinkDown):
                raise BrokerError(f"{event.reason}: is it running, and is its address right?")
            if isinstance(event, Message) and event.payload:
                return open_reported(event.payload)
    except queue.Empty as error:
        raise TransportError(
            f"no agent ever connected to this broker as {device}: compare the id with device in "
            "its agent.toml, and look whether tandem-agent runs"
        ) from error
    except ValueError as error:
        raise TransportError(f"the report of {device} is not understood: {error}") from error
    finally:
        ended.set()
        link.close()
