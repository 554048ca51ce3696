"""A board behind a broker: what it reports, and `tandem deploy` to it alone."""

import queue
import threading
import time

from device.control.upload_request import BoardFacts
from device.errors import BrokerError
from device.protocol.control import Answer
from device.protocol.documents import Reported
from device.protocol.mqtt import Link, LinkDown, LinkEvent, LinkSettings, Message, queue_putter
from device.protocol.signed import open_reported
from device.protocol.topics import Topics
from toolkit.fleet.brokers.address import BrokerAddress
from toolkit.fleet.transports.delivery import Delivery
from toolkit.fleet.transports.deploy import deploy_bundle
from toolkit.fleet.transports.deployment import DeployProgress
from toolkit.fleet.transports.transport import (
    Delivered,
    OnProgress,
    Progress,
    RefusedError,
    RolledBackError,
    TransportError,
)

REPORT_S = 20.0  # a retained report comes at once; a slow broker may take longer


class MqttBoard:
    """One device of a broker."""

    def __init__(self, broker: BrokerAddress, device: str, timeout_s: float) -> None:
        """`timeout_s`: give the device up when it is silent for so long."""
        self.name = device
        self._broker = broker
        self._timeout_s = timeout_s

    def facts(self) -> BoardFacts:
        """Return what the device's retained report says."""
        reported = _read_report(self._broker, self.name)
        return BoardFacts(facts=reported.facts, answer=Answer(device=self.name, reported=reported))

    def deliver(self, delivery: Delivery, on_progress: OnProgress) -> Delivered:
        """Deploy, and take the report at the end.

        The text of KeyboardInterrupt says what has become of the release: see
        `toolkit.fleet.transports.withdrawal`.
        """
        if delivery.erase:
            raise RefusedError(
                "what a board has received is not erased through a broker: leave out `tandem flash "
                "--erase-cache`, or flash over ssh:// or serial://"
            )

        def show(progress: DeployProgress) -> None:
            received = progress.received_bytes
            on_progress(Progress(progress.phase, received, progress.total_bytes))

        result = deploy_bundle(
            delivery.bundle,
            self.name,
            self._broker,
            timeout_s=self._timeout_s,
            retry=True,
            fleet=delivery.fleet,
            policy=delivery.policy,
            withdraw=True,
            on_progress=show,
        )
        if result.phase == "refused":
            raise RefusedError(f"{self.name} refused {delivery.named}: {result.reason}")
        if result.phase == "rolled_back":
            raise RolledBackError(f"{self.name} rolled {delivery.named} back: {result.reason}")
        waits = result.phase == "trial"
        if not result.live and not waits:
            raise TransportError(f"{delivery.named} is not live on {self.name}: {result.reason}")
        return Delivered(result.sent_bytes, _read_report(self._broker, self.name).measured, waits)

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
    topic = Topics(device).reported
    settings = LinkSettings(
        host=broker.host,
        port=broker.port,
        client_id=f"tandem-flash-{threading.get_native_id()}",
        subscriptions=((topic, 1),),
        username=broker.username,
        password=broker.password,
        tls=broker.tls,
    )
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
