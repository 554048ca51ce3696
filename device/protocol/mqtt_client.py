"""paho's client, made safe against what a broker may send."""

import ssl
import struct
import threading
import time
from collections.abc import Callable
from typing import Literal

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.exception import MalformedPacket
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

MAX_MESSAGE_BYTES = 2 * 1024**2  # the largest expected, an index, has 1 MiB
MAX_PACKET_BYTES = MAX_MESSAGE_BYTES + 2 * 65536  # with the topic and properties
PUBLISH, PUBACK = 0x30, 0x40  # the type of a packet, in its upper four bits
READ_BYTES = 16 * 1024  # a TLS record
READS_A_TURN = 64
_ACCEPTED = ReasonCode(PacketTypes.PUBACK)
_NO_PROPERTIES = Properties(PacketTypes.PUBACK)  # type: ignore[no-untyped-call]


class Client(paho.Client):
    """A paho client that reports how its thread ended, also with an exception.

    `giant_bytes`, `giant_topic`: of the packet that was too large and ended the connection.
    `tls_error`: what TLS said as it ended.
    """

    def __init__(
        self,
        version: MQTTProtocolVersion,
        client_id: str,
        take_message: Callable[[bytes, bytes, bool], None],
    ) -> None:
        """`take_message` gets topic, payload, and whether the broker had retained it."""
        super().__init__(
            CallbackAPIVersion.VERSION2,
            client_id=client_id,
            clean_session=None if version == MQTTProtocolVersion.MQTTv5 else True,
            protocol=version,
            reconnect_on_failure=False,
        )
        self._take_message = take_message
        self.ended = threading.Event()
        self.failure = ""
        self.giant_bytes = 0
        self.giant_topic = ""
        self.tls_error: ssl.SSLError | None = None
        self._giant_head = b""
        self._unread = b""  # read from the socket; up to `_taken` it was taken
        self._taken = 0
        self._acknowledgements = b""  # of the messages of this turn
        self._reads_left = 0  # of the socket, before something is written again

    def _packet_read(self) -> MQTTErrorCode:
        """Take a packet. One that is here whole is taken at once: paho asks for its head byte by
        byte, which takes longer than all that is done with it."""
        start, data = self._taken, self._unread
        body = None if self._in_packet["command"] else _body(data, start)
        if body is None:
            return super()._packet_read()
        self._taken = body.stop
        self._in_packet["command"] = data[start]
        self._in_packet["remaining_length"] = body.stop - body.start
        self._in_packet["packet"] = bytearray(data[body])
        try:
            return self._packet_handle()
        except MalformedPacket:
            return MQTTErrorCode.MQTT_ERR_PROTOCOL
        finally:
            self._in_packet = {
                "command": 0, "have_remaining": 0, "remaining_count": [], "remaining_mult": 1,
                "remaining_length": 0, "packet": bytearray(), "to_process": 0, "pos": 0,
            }  # fmt: skip

    def _handle_on_message(self, message: paho.MQTTMessage) -> None:
        """Hand a message over; paho looks for callbacks by its topic first, and there are none."""
        self._take_message(message._topic, bytes(message.payload), message.retain)

    def _send_puback(self, mid: int) -> MQTTErrorCode:
        """Acknowledge a message, with the others of this turn: each packet that is sent is a record
        of TLS."""
        self._acknowledgements += struct.pack("!BBH", PUBACK, 2, mid)
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def _handle_publish(self) -> MQTTErrorCode:
        """Take a message. One of MQTT 5 without properties is read here: paho makes an object with
        all 27 for each, and a lock, which is half of its thread's time."""
        head, packet = self._in_packet["command"], self._in_packet["packet"]
        qos, topic_end = head >> 1 & 3, 2 + int.from_bytes(packet[:2], "big")
        begin = topic_end + (2 if qos else 0)
        has_properties = packet[begin : begin + 1] != b"\0"  # or is damaged
        if self._protocol != MQTTProtocolVersion.MQTTv5 or qos > 1 or has_properties:
            return super()._handle_publish()
        number = int.from_bytes(packet[topic_end:begin], "big")
        topic, payload = bytes(packet[2:topic_end]), bytes(packet[begin + 1 :])
        self._take_message(topic, payload, bool(head & 1))
        return self._send_puback(number) if qos else MQTTErrorCode.MQTT_ERR_SUCCESS

    def _handle_pubackcomp(self, cmd: Literal["PUBACK", "PUBCOMP"]) -> MQTTErrorCode:
        """Take an acknowledgement; one that says nothing but yes for the same reason here."""
        packet = self._in_packet["packet"]
        if cmd != "PUBACK" or len(packet) != 2:
            return super()._handle_pubackcomp(cmd)
        number = int.from_bytes(packet, "big")
        with self._out_message_mutex:
            if number in self._out_messages:
                return self._do_on_publish(number, _ACCEPTED, _NO_PROPERTIES)
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def _sock_recv(self, bufsize: int) -> bytes:
        """Return bytes of the connection; paho asks for a whole packet once it has its header.

        Brokers of MQTT 5 are told the limit. Those of 3.1.1 are not, and paho would collect the
        packet in memory first: of a giant only its topic is read.
        """
        if bufsize <= MAX_PACKET_BYTES:
            return self._read(bufsize)
        if self._in_packet["command"] & 0xF0 == PUBLISH:
            self._read_giant_topic()
        self.giant_bytes = bufsize
        raise ConnectionError(f"a packet of {bufsize} bytes")

    def _read_giant_topic(self) -> None:
        """Read the topic, with which a message begins; BlockingIOError: more of it will come."""
        self._giant_head += self._read(2 + 65535 - len(self._giant_head))
        end = 2 + int.from_bytes(self._giant_head[:2], "big")
        if len(self._giant_head) < end:
            raise BlockingIOError
        self.giant_topic = self._giant_head[2:end].decode(errors="replace")

    def _read(self, count: int) -> bytes:
        """Return at most `count` bytes; BlockingIOError: none are there, or others have their turn.

        The socket is read in larger pieces: paho asks for a packet's header byte by byte.
        """
        if self._taken == len(self._unread):
            self._reads_left -= 1
            if self._reads_left < 0:
                raise BlockingIOError
            try:
                self._unread, self._taken = super()._sock_recv(max(count, READ_BYTES)), 0
                self._last_bytes_received = time.monotonic()
            except BlockingIOError:
                self._reads_left = 0
                raise
            except ssl.SSLError as error:  # paho says only that the connection was lost
                self.tls_error = error
                raise
        data = self._unread[self._taken : self._taken + count]
        self._taken += len(data)
        return data

    def loop_read(self, max_packets: int = 1) -> MQTTErrorCode:
        """Read the packets that are there; paho waits in `select` before each one."""
        self._reads_left, code = READS_A_TURN, MQTTErrorCode.MQTT_ERR_SUCCESS
        while not code and self._sock is not None and self._has_more():
            code = super().loop_read(max_packets)
        if self._acknowledgements and not code:
            self._packet_queue(PUBACK, self._acknowledgements, 0, 1)
            self._acknowledgements = b""
        return code

    def _loop(self, timeout: float = 1.0) -> MQTTErrorCode:
        """Wait for the connection, a message to send, or the keepalive. paho's thread would wake
        each second to look whether that is due."""
        return super()._loop(self._keepalive_in_s() if self._keepalive else timeout)

    def _keepalive_in_s(self) -> float:
        """Return how long until a ping is due, or the connection is lost without its answer."""
        with self._msgtime_mutex:
            begins_s = min(self._last_msg_out, self._last_bytes_received)
        if self._ping_t > 0:
            begins_s = min(begins_s, self._ping_t)
        return max(0.0, begins_s + self._keepalive - time.monotonic())

    def _has_more(self) -> bool:
        return self._taken < len(self._unread) or self._reads_left > 0

    def loop_forever(
        self, timeout: float = 1.0, retry_first_connection: bool = False
    ) -> MQTTErrorCode:
        """What paho's thread runs."""
        try:
            return super().loop_forever(timeout, retry_first_connection)
        except Exception as error:  # noqa: BLE001  (whatever a broken packet breaks in paho)
            self.failure = f"{type(error).__name__}: {error}"
            return MQTTErrorCode.MQTT_ERR_PROTOCOL
        finally:
            self.ended.set()


def _body(data: bytes, start: int) -> slice | None:
    """Return where the rest of the packet is whose head begins at `start`; None: it is not here
    whole, or its length is no number of MQTT."""
    length = shift = 0
    for at in range(start + 1, min(start + 5, len(data))):
        length |= (data[at] & 0x7F) << shift
        if data[at] < 0x80:
            stop = at + 1 + length
            return slice(at + 1, stop) if stop <= len(data) else None
        shift += 7
    return None
