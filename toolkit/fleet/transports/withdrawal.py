"""Takes a release back that one device was told to run, while its trial has not begun.

What is desired stays at the broker, so a deployment that only ends would be installed all the same.
The document that was desired before takes its place, or none. A signed device takes no document
whose counter is lower than one that it has seen, so what it runs is then stated anew.
"""

import contextlib
import queue
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from device.errors import TrustError
from device.protocol.documents import Desired, Reported, Signed
from device.protocol.mqtt import Link, LinkEvent, Message
from device.protocol.signed import count_valid, open_desired, open_reported
from toolkit.errors import FleetError
from toolkit.fleet.transports.device_deployment import Before, Deployment

ECHO_S = 2.0  # until what is retained has come
BROKER_S = 5.0  # until a broker that is away is given up
SETTLE_S = 5.0  # until the device has said that it stops
LOOK_S = 0.5
GO_BACK = "`tandem-agent control rollback` on the board goes back"


def document_before(before: Before, ours: bytes, fleet: Path | None) -> bytes:
    """Return the document that takes the place of `ours`; b"" where nothing is to be desired.

    A document that the device did not follow, as somebody has brought it another release, is not
    put back: it would install that one. `fleet`: the folder whose keys have signed ours.
    """
    if not before.desired or not before.reported:
        return before.desired  # no agent was ever there, or nothing was desired of it
    try:
        desired, signed = open_desired(before.desired)
        reported = open_reported(before.reported)
    except ValueError:  # of a newer version: it is the device's to judge
        return before.desired
    if reported.update.request != desired.request:
        return b""
    if signed is None or fleet is None:
        return before.desired
    return _stated_anew(before, desired, signed, ours, fleet)


def _stated_anew(
    before: Before, desired: Desired, signed: Signed, ours: bytes, fleet: Path
) -> bytes:
    """Return a signed document with a higher counter; b"" unless the device surely runs it.

    Whoever may publish could leave an old document there, to have it signed again. So it must be
    the director's and valid still, and what the device runs by its report, which it has to have
    signed where it was enrolled.
    """
    from device.trust.desired import check_address
    from toolkit.fleet.folder import IDENTITY
    from toolkit.fleet.trust.director import addressed, next_counter, sign_desired
    from toolkit.fleet.trust.report_keys import ReportKeys
    from toolkit.fleet.trust.repository import FleetRepository

    try:
        signer = FleetRepository(fleet).director_signer()
        reported = ReportKeys(fleet / IDENTITY).read(before.device, before.reported)
        check_address(desired, before.device, datetime.now(timezone.utc))
    except (TrustError, FleetError, ValueError):
        return b""
    key, running = signer.public_key, reported.running
    if not count_valid(signed, {key.keyid: key}):
        return b""
    if running is None or running.sha256 != desired.release.blob.sha256:
        return b""
    counter = next_counter(max(desired.counter, open_desired(ours)[0].counter))
    return sign_desired(addressed(desired, before.device, counter), signer)


class Withdrawal:
    """Takes the release of one deployment back; `run` says in a sentence what has become of it."""

    def __init__(
        self,
        deployment: Deployment,
        link: Link,
        events: "queue.Queue[LinkEvent]",
        *,
        ours: bytes,
        fleet: Path | None,
        serve: Callable[[Message], bool],
    ) -> None:
        """`ours`: the document that is taken back; `serve` answers for signed metadata."""
        self._deployment = deployment
        self._link = link
        self._events = events
        self._ours = ours
        self._fleet = fleet
        self._serve = serve
        self._newest: Reported | None = None

    def run(self) -> str:
        """Withdraw, unless the trial has begun; "" if nothing was asked of the device yet."""
        deployment = self._deployment
        if not deployment.published:
            return ""
        self._listen(ECHO_S, self._note, until=self._is_up_to_date)
        sentence = self._too_late()
        if sentence:
            return sentence
        document = document_before(deployment.before, self._ours, self._fleet)
        if deployment.phase == "trial" and not (self._is_manual and document):
            return f"{self._who} tries {self._what} already, and goes on; {GO_BACK}"
        if not self._publish(document):
            return self._too_late() or (
                f"the broker does not answer, so {self._what} stays desired and {self._who} may "
                "install it: flash the release before once the broker is back"
            )
        self._listen(SETTLE_S, self._hear, until=self._has_let_go)
        return self._outcome(document)

    @property
    def _who(self) -> str:
        return self._deployment.topics.device

    @property
    def _what(self) -> str:
        return self._deployment.named

    @property
    def _is_manual(self) -> bool:
        """Whether another release ends the trial (`InstallPolicy.manual`)."""
        return self._deployment.desired.policy.manual

    def _too_late(self) -> str:
        """Return what is said where nothing is to be withdrawn any more, else ""."""
        result = self._deployment.result
        if result is None:
            return ""
        if result.phase == "superseded":
            return f"{result.reason}: nothing was withdrawn"
        if result.phase == "live":
            return f"{self._what} is live on {self._who}; {GO_BACK}"
        if result.phase in ("rolled_back", "refused"):
            return f"{self._who} stays on its old release: {result.reason}"
        return ""

    def _publish(self, document: bytes) -> bool:
        """Publish as soon as the broker is there; return whether it has the document."""
        until_s, topic = time.monotonic() + BROKER_S, self._deployment.topics.desired
        while True:
            remaining_s = max(0.1, until_s - time.monotonic())
            if self._link.publish(topic, document, qos=1, retain=True, wait_s=remaining_s):
                return True
            if time.monotonic() >= until_s or self._too_late():
                return False
            self._listen(LOOK_S, self._note, until=lambda: False)

    def _is_up_to_date(self) -> bool:
        return self._deployment.echoed and self._events.empty()

    def _has_let_go(self) -> bool:
        newest, ours = self._newest, self._deployment.desired.request
        return newest is not None and newest.update.request != ours

    def _runs_ours(self, report: Reported) -> bool:
        running = report.running
        return (
            running is not None and running.sha256 == self._deployment.desired.release.blob.sha256
        )

    def _outcome(self, document: bytes) -> str:
        """Return what the device has made of it."""
        newest = self._newest
        after = (
            "what was desired before is desired again" if document else "nothing is desired of it"
        )
        # It may have reached the trial while the document was on its way.
        if newest is not None and (self._runs_ours(newest) or newest.update.phase == "trial"):
            if document:
                return (
                    f"{self._who} had begun to try {self._what}: it goes back by itself when that "
                    f"has ended, as {after}"
                )
            return f"{self._who} had begun to try {self._what}, and goes on; {GO_BACK}"
        if self._has_let_go():
            return f"{self._who} stays on its old release, and keeps what has arrived; {after}"
        return (
            f"{self._what} is withdrawn at the broker, and {after}; {self._who} has not said yet "
            "that it stops: look with `tandem board info`"
        )

    # -- events

    def _listen(
        self, seconds: float, take: Callable[[Message], None], *, until: Callable[[], bool]
    ) -> None:
        """Take events for so long, or until something is known."""
        end_s = time.monotonic() + seconds
        while not until():
            try:
                event = self._events.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                return
            if isinstance(event, Message) and not self._serve(event):
                take(event)

    def _note(self, message: Message) -> None:
        """Take what comes before it is decided; the deployment knows what it means."""
        with contextlib.suppress(ValueError):  # of a newer agent
            if message.topic in self._deployment.subscriptions:
                self._deployment.on_message(message, time.monotonic())

    def _hear(self, message: Message) -> None:
        """Take a report: whom the device obeys now."""
        if message.topic != self._deployment.topics.reported or not message.payload:
            return
        with contextlib.suppress(ValueError):
            self._newest = open_reported(message.payload)
