"""The agent's connection: birth and will messages, the reported state, and rivals.

Two agents with one id throw each other off the broker, in turn and without end, as a client id may
be connected once. Each finds in the retained state the sessions of the other.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from device.agent.config import AgentConfig, tls_files
from device.agent.event_sender import EventSender
from device.agent.outbox import Outbox
from device.agent.reporter import ReportCounter, Reporter
from device.protocol.device_key import ReportSigner
from device.protocol.documents import AgentState, Reported, StateDocument, decode, encode
from device.protocol.mqtt import Link, LinkDown, LinkEvent, LinkSettings, LinkUp, Will
from device.protocol.topics import Topics

LOG = logging.getLogger("tandem.agent")
OUTBOX = "outbox.db"  # in state_dir
COUNTER = "report_counter"  # in state_dir
LOG_INTERVAL_S = 60.0  # between two log lines about a broker that cannot be reached
STOPPED_WAIT_S = 2.0
OWN_KEPT = 16  # connections: a will comes soon after its own, if at all
RIVAL_S = 300.0  # a rival that was not seen for so long is gone


class Rivals:
    """Tells from the sessions of state documents whether another agent uses our id.

    The first foreign one is what an earlier process left. Another one can only be a rival's if it
    is younger than our first, or if there are two: a process that ended left one will at most.
    """

    def __init__(self) -> None:
        self._own: list[int] = []
        self._left_behind: int | None = None
        self._foreign: set[int] = set()

    def note_own(self, session: int) -> None:
        """Note a connection of ours."""
        self._own.append(session)
        del self._own[1:-OWN_KEPT]

    def is_rival(self, session: int) -> bool:
        """Take the session of a state document; return whether it is a rival's."""
        if not self._own or session in self._own:
            return False
        if self._left_behind is None:
            self._left_behind = session
        if session == self._left_behind:
            return False
        self._foreign = {*sorted(self._foreign)[-1:], session}
        return session > self._own[0] or len(self._foreign) > 1


class BrokerConnection:
    """The connection to the broker, with its birth and will messages and the report."""

    def __init__(
        self, config: AgentConfig, topics: Topics, put: Callable[[LinkEvent], None]
    ) -> None:
        self._topics = topics
        self._link = Link(_settings(config, topics), put, self._will)
        tls = tls_files(config.broker)
        key = None if tls is None else tls.key
        self._signer = None if key is None else ReportSigner(key)
        state_dir = Path(config.state_dir)
        counter = ReportCounter(state_dir / COUNTER)
        self._reporter = Reporter(
            self._link, topics, counter, self._signer, beat_s=config.broker.beat_s
        )
        self._events = EventSender(self._link, topics, Outbox(state_dir / OUTBOX))
        self._log_due_s = 0.0
        self._device = config.device
        self._rivals = Rivals()
        self._rival = (0, float("-inf"))  # its session, and when it was seen
        self._mqtt_version = ""
        self.session = 0  # 0: no connection

    @property
    def online(self) -> bool:
        """Whether the agent is connected."""
        return self.session != 0

    @property
    def warning(self) -> str:
        """What the report says of the connection; empty if all is well."""
        unsigned = "" if self._signer is None else self._signer.problem
        return "; ".join(filter(None, (self._rival_warning(), self._giant_warning(), unsigned)))

    def _giant_warning(self) -> str:
        topics = ", ".join(self._link.left_out)
        if not topics:
            return ""
        return (
            f"a message on {topics} is larger than this device takes, so that it does without "
            "what comes there, and tries again: clear the retained message"
        )

    def _rival_warning(self) -> str:
        session, seen_s = self._rival
        if time.monotonic() - seen_s > RIVAL_S:
            return ""
        return (
            f"another agent calls itself {self._device} too (its session is {session}): they throw"
            " each other off the broker; give each board its own `device` in agent.toml"
        )

    def start(self) -> None:
        """Begin to connect."""
        self._link.start()

    def send(self, topic: str, payload: bytes) -> None:
        """Publish with QoS 0; dropped while offline."""
        if self.online:
            self._link.publish(topic, payload, qos=0)

    def retain(self, topic: str, payload: bytes) -> bool:
        """Publish retained with QoS 1; False: the connection does not take it now."""
        return self.online and self._link.publish(topic, payload, qos=1, retain=True)

    def report(self, report: Reported, now_s: float) -> None:
        """Publish the report if it changed, and the events that it tells; offline they wait. A
        beat, if nothing else was said: over MQTT 3.1.1 state and report again."""
        self._events.offer(report)
        if self.online:
            if self._mqtt_version == "3.1.1" and self._reporter.is_beat_due(now_s):
                # A server behind RabbitMQ gets no retained document of `+`: it knows what it hears.
                self._publish_state("online")
                self._reporter.forget()
            self._reporter.offer(report, now_s)
            self._events.advance()

    def report_due_s(self, report: Reported) -> float | None:
        """Return when `report` has something to publish; None: offline."""
        return self._reporter.due_s(report) if self.online else None

    def on_link_up(self, event: LinkUp) -> None:
        """Publish the birth message, and the report again: the broker may have lost both."""
        LOG.info("connected to the broker with MQTT %s", event.mqtt_version)
        self.session, self._mqtt_version = event.session, event.mqtt_version
        self._rivals.note_own(event.session)
        self._log_due_s = 0.0
        self._reporter.forget()
        self._events.on_link_up()
        self._publish_state("online")

    def on_desired_again(self) -> None:
        """Report again: a server of a cluster whose nodes keep retained documents each for itself
        (RabbitMQ, MQTT 3.1.1) has not seen the report, and says again what it asks for."""
        if self._mqtt_version == "3.1.1":
            self._reporter.forget()

    def on_link_down(self, event: LinkDown) -> None:
        """Go offline; log the reason at most once in LOG_INTERVAL_S."""
        self.session = 0
        now_s = time.monotonic()
        if now_s >= self._log_due_s:
            self._log_due_s = now_s + LOG_INTERVAL_S
            LOG.warning("%s; the pipeline goes on, and so do the tries to connect", event.reason)

    def on_own_state(self, payload: bytes) -> None:
        """Publish the birth again if the will of an earlier connection came after it; notice
        another agent with our id."""
        try:
            document = decode(payload, StateDocument)
        except ValueError:
            return
        if self._rivals.is_rival(document.session):
            news = not self._rival_warning()
            self._rival = (document.session, time.monotonic())
            if news:
                LOG.error("%s", self._rival_warning())
        if self.online and document.session != self.session:
            self._publish_state("online")

    def publish_stopped(self) -> None:
        """Publish the state `stopped` and wait for the acknowledgement."""
        if self.online:
            self._publish_state("stopped", STOPPED_WAIT_S)

    def close(self) -> None:
        """Disconnect."""
        self._link.close()
        self._events.close()

    def _publish_state(self, state: AgentState, wait_s: float = 0.0) -> None:
        payload = encode(StateDocument(state=state, session=self.session))
        self._link.publish(self._topics.state, payload, qos=1, retain=True, wait_s=wait_s)

    def _will(self, session: int) -> Will:
        return Will(self._topics.state, encode(StateDocument(state="lost", session=session)))


def _settings(config: AgentConfig, topics: Topics) -> LinkSettings:
    broker = config.broker
    return LinkSettings(
        host=broker.host,
        port=broker.port,
        client_id=f"tandem-agent-{config.device}",
        subscriptions=(
            (topics.desired, 1),
            (topics.state, 1),
            (topics.chunks, 0),
            (topics.tuf_replies, 0),
            (topics.commands, 1),
        ),
        mqtt_version=broker.mqtt_version,
        username=broker.username,
        password=broker.password,
        keepalive_s=broker.keepalive_s,
        tls=tls_files(broker),
    )
