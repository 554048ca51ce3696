"""Serial lines: bytes that others understand, on a real pseudo terminal."""

import math
import os
import random
import termios
import tty
from dataclasses import replace

import numpy as np
import pytest
import serial
from sink_fixtures import LABELS, detections
from sink_fixtures import result as plain_result
from video_fixtures import PATIENCE_S, wait_for

from device.errors import PipelineError
from pipelines.sink_config import SerialSink
from pipelines.sinks import mavlink
from pipelines.sinks.autopilot import SECTORS, Autopilot, landing_target, obstacle_sectors
from pipelines.sinks.board_status import BoardStatus
from pipelines.sinks.records import Target, cobs, cobs_frame, nmea_lines
from pipelines.sinks.result import SinkContext
from pipelines.sinks.table import open_sink

RED = Target(0, "red", 0.9, (300.0, 200.0, 340.0, 280.0), track=7)


# --- MAVLink


def random_values(message, rng):
    """Values for every field; half of them zero, so that payloads are cut, too."""
    values = {}
    for name, code in message.fields:
        count, kind = int(code[:-1] or 1), code[-1]
        if kind == "f":
            row = [float(np.float32(rng.uniform(-1e3, 1e3))) for _ in range(count)]
        else:
            bits = 8 * {"b": 1, "B": 1, "h": 2, "H": 2, "I": 4, "q": 8, "Q": 8}[kind]
            low = -(2 ** (bits - 1)) if kind.islower() else 0
            row = [rng.randrange(low, low + 2**bits) for _ in range(count)]
        zero = rng.random() < 0.5
        values[name] = [0] * count if zero else row
        if count == 1:
            values[name] = values[name][0]
    return values


@pytest.mark.parametrize("message", mavlink.MESSAGES.values(), ids=lambda one: str(one.id))
def test_frames_are_those_of_pymavlink_byte_for_byte(message):
    os.environ["MAVLINK20"] = "1"
    from pymavlink.dialects.v20 import common as dialect

    rng = random.Random()
    kind = dialect.mavlink_map[message.id]
    names = [name for name, _ in message.fields]
    assert kind.crc_extra == message.crc_extra
    for _ in range(50):
        values, sequence = random_values(message, rng), rng.randrange(256)
        link = dialect.MAVLink(None, srcSystem=1, srcComponent=191)
        link.seq = sequence
        # Extensions that this pymavlink does not know yet are left out of both.
        known = {name: values[name] for name in names if name in kind.fieldnames}
        expected = kind(**known).pack(link)
        ours = mavlink.encode(message, known, sequence=sequence, system=1, component=191)
        assert ours == bytes(expected)


def test_a_reader_finds_whole_frames_among_damage():
    rng = random.Random()
    reader, sent, stream = mavlink.Reader(), [], b""
    for sequence in range(60):
        message = rng.choice(list(mavlink.MESSAGES.values()))
        frame = mavlink.encode(
            message, random_values(message, rng), sequence=sequence, system=1, component=1
        )
        if sequence % 3 == 0:
            broken = bytearray(frame)
            broken[rng.randrange(10, len(frame))] ^= 1 + rng.randrange(255)
            stream += bytes(broken)
        else:
            sent.append(message.id)
            stream += bytes(rng.randrange(0xFD) for _ in range(rng.randrange(4))) + frame
    stream += bytes(300)  # what a damaged length waits for
    seen = []
    while stream:
        size = rng.randrange(1, 40)
        seen += [number for number, _ in reader.feed(stream[:size])]
        stream = stream[size:]
    assert seen == sent


def messages_in(data):
    return list(mavlink.Reader().feed(data))


def test_a_target_is_a_direction_from_the_optical_axis():
    focal_px = 320 / math.tan(math.radians(30))  # 60 degrees over 640 pixels
    values = landing_target(Target(0, "red", 1.0, (630, 230, 650, 250)), focal_px, 640, 480, 0.0)
    assert math.degrees(values["angle_x"]) == pytest.approx(30.0)
    assert values["angle_y"] == pytest.approx(0.0)
    assert values["size_x"] == pytest.approx(2 * math.atan(10 / focal_px))


def test_a_known_height_gives_the_distance_and_its_sectors():
    autopilot = Autopilot(60.0, {"red": 1.0})
    data = autopilot.frame(0, 5_000_000_000, [RED], 640, 480)
    fields = dict(messages_in(data))
    metres = 320 / math.tan(math.radians(30)) / 80
    assert fields[149]["distance"][0] == pytest.approx(metres, rel=1e-6)
    assert fields[149]["time_usec"] == (5_000_000,)
    near = [i for i, cm in enumerate(fields[330]["distances"]) if cm != 65535]
    assert near == list(range(near[0], near[-1] + 1))
    assert set(near) == {33, 34, 35, 36, 37, 38}  # 40 of 640 pixels around the middle
    assert fields[330]["distances"][36] == round(100 * metres)
    assert fields[330]["increment_f"][0] * SECTORS == pytest.approx(60.0)
    assert fields[275]["tracking_status"] == (1,)


def test_the_nearest_object_fills_a_sector():
    boxes = [((0.0, 0.0, 640.0, 10.0), 5.0), ((0.0, 0.0, 640.0, 10.0), 3.0)]
    assert obstacle_sectors(boxes, 554.0, 640, math.radians(60)) == [300] * SECTORS


def test_a_target_is_kept_while_it_is_there():
    autopilot = Autopilot(60.0, {})
    second = Target(1, "green", 0.95, (10.0, 10.0, 30.0, 30.0), track=9)
    seen = []
    for targets in ([RED], [second, RED], [second], [second, RED]):
        fields = dict(messages_in(autopilot.frame(0, 0, targets, 640, 480)))
        seen.append(round(640 * fields[275]["rec_top_x"][0]))
    assert seen == [300, 300, 10, 10]
    idle = dict(messages_in(autopilot.frame(0, 0, [], 640, 480)))
    assert set(idle) == {275}
    assert idle[275]["tracking_status"] == (0,)


def test_capture_times_are_on_the_clock_of_the_autopilot():
    now_ns = [50_000_000_000]
    autopilot = Autopilot(60.0, {}, clock_ns=lambda: now_ns[0])
    ahead_ns = 7_000_000_000
    for travel_ns in (40_000_000, 4_000_000, 90_000_000):  # the shortest is believed
        requests = dict(messages_in(autopilot.periodic(now_ns[0] / 1e9)))
        sent_ns = requests[111]["ts1"][0]
        now_ns[0] += travel_ns
        answer = {"tc1": sent_ns + travel_ns // 2 + ahead_ns, "ts1": sent_ns}
        autopilot.received(
            mavlink.encode(mavlink.TIMESYNC, answer, sequence=0, system=1, component=1)
        )
        now_ns[0] += 2_000_000_000
    assert autopilot.offset_ns == ahead_ns
    fields = dict(messages_in(autopilot.frame(60_000_000_000, 0, [RED], 640, 480)))
    assert fields[149]["time_usec"] == (67_000_000,)


def test_a_request_for_the_time_is_answered():
    autopilot = Autopilot(60.0, {}, clock_ns=lambda: 123)
    request = mavlink.encode(
        mavlink.TIMESYNC, {"tc1": 0, "ts1": 99}, sequence=0, system=1, component=1
    )
    assert messages_in(autopilot.received(request)) == [(111, {"tc1": (123,), "ts1": (99,)})]


def test_the_status_of_this_machine_and_of_none(tmp_path):
    status = BoardStatus()
    status.values(0)
    values = status.values(0)
    assert 0 < values["ram_usage"] < values["ram_total"] < 2**32 - 1
    assert values["uptime"] > 0
    assert all(0 <= load <= 100 or load == 255 for load in values["cpu_cores"])
    nothing = BoardStatus(tmp_path).values(0)
    assert nothing["ram_total"] == 2**32 - 1
    assert nothing["temperature_board"] == 127
    assert set(nothing["cpu_cores"]) == {255}


# --- records and lines


def uncobs(data):
    """The inverse, as its authors describe it."""
    out, at = bytearray(), 0
    while at < len(data):
        code = data[at]
        assert code
        out += data[at + 1 : at + code]
        at += code
        if code < 255 and at < len(data):
            out.append(0)
    return bytes(out)


@pytest.mark.parametrize("length", [0, 1, 253, 254, 255, 508, 509, 800])
@pytest.mark.parametrize("zeros", [0.0, 0.01, 0.6])
def test_cobs_comes_back_and_has_no_zero(length, zeros):
    rng = random.Random()
    data = bytes(0 if rng.random() < zeros else rng.randrange(1, 256) for _ in range(length))
    assert 0 not in cobs(data)
    assert uncobs(cobs(data)) == data


def crc16_ccitt(data):
    value = 0xFFFF
    for byte in data:
        value ^= byte << 8
        for _ in range(8):
            value = (value << 1) ^ (0x1021 if value & 0x8000 else 0)
            value &= 0xFFFF
    return value


def test_a_record_is_read_back_with_its_checksum():
    outside = Target(300, "x", 2.0, (-40000.0, 0.0, 3.0, 9e9), track=70000)
    frame = cobs_frame(65537, 2**32 + 5, [RED, outside])
    assert frame.endswith(b"\0")
    record = uncobs(frame[:-1])
    assert record[:8] == bytes([1, 2, 1, 0, 5, 0, 0, 0])
    row = np.frombuffer(record[8:-2], "<i2,<i2,<i2,<i2,u1,u1,<u2")
    assert row[0].tolist() == (300, 200, 40, 80, 230, 0, 7)
    assert row[1].tolist() == (-32768, 0, 32767, 32767, 255, 255, 70000 & 0xFFFF)
    assert int.from_bytes(record[-2:], "little") == crc16_ccitt(record[:-2])
    assert len(cobs_frame(1, 1, [RED] * 8)) <= 110


def test_lines_have_a_head_and_checksums():
    odd = Target(1, "a,b*é", 0.5, (1.0, 2.0, 4.0, 6.0))
    lines = nmea_lines(5, 123, [RED, odd]).decode("ascii").split("\r\n")
    assert lines[0].startswith("$FRM,5,123,2*")
    assert lines[1].startswith("$DET,5,123,red,7,300,200,40,80,0.90*")
    assert lines[2].startswith("$DET,5,123,a_b__,0,1,2,3,4,0.50*")
    for line in lines[:3]:
        body, _, checksum = line[1:].partition("*")
        assert int(checksum, 16) == np.bitwise_xor.reduce(np.frombuffer(body.encode(), np.uint8))
    assert lines[3] == ""


# --- the port


class Terminal:
    """A pseudo terminal behind a path that stays, as a USB adapter's does."""

    def __init__(self, path):
        self.path = path
        self.plug()

    def plug(self):
        self.far, self._near = os.openpty()
        tty.setraw(self._near)
        os.set_blocking(self.far, False)
        self.path.unlink(missing_ok=True)
        self.path.symlink_to(os.ttyname(self._near))

    def unplug(self):
        self.path.unlink()
        os.close(self.far)
        os.close(self._near)

    def read(self):
        try:
            return os.read(self.far, 65536)
        except BlockingIOError:
            return b""


@pytest.fixture
def terminal(tmp_path):
    return Terminal(tmp_path / "ttyUSB0")


def result(seq):
    return plain_result(seq, objects=detections(([8, 16, 16, 24], 0.9, 0), ([1, 2, 3, 4], 0.5, 1)))


def read_until(terminal, sink, expected, begin=0):
    """Write frames until the other side has read some bytes; return all that it read."""
    data = bytearray()
    seq = iter(range(begin, 10**6))

    def step():
        sink.write(result(next(seq)))
        data.extend(terminal.read())
        return expected in data

    wait_for(step, PATIENCE_S, f"{expected!r} on the line")
    return bytes(data)


def serial_sink(terminal, **options):
    config = SerialSink(port=str(terminal.path), max_hz=1e6, **options)
    return open_sink(config, SinkContext(LABELS))


def test_lines_arrive_and_a_port_that_went_away_is_opened_again(terminal):
    with serial_sink(terminal, classes=("red",)) as sink:
        data = read_until(terminal, sink, b"$DET")
        assert b",red,0,8,16,8,8,0.90*" in data
        assert b"green" not in data
        terminal.unplug()
        before = sink.dropped.get("serial_away", 0)
        wait_for(
            lambda: (sink.write(result(0)), sink.dropped.get("serial_away", 0) > before)[1],
            PATIENCE_S,
            "the port is missed",
        )
        terminal.plug()
        assert b"$DET" in read_until(terminal, sink, b"$DET")


def test_a_line_that_takes_nothing_holds_nothing_up_and_gets_the_latest_frame(terminal):
    with serial_sink(terminal, write_timeout_s=0.2) as sink:
        read_until(terminal, sink, b"$FRM")
        last = 0

        def stuck():  # nobody reads: the terminal's buffer fills
            nonlocal last
            last += 1
            sink.write(result(last))
            return sink.dropped.get("serial_timeout", 0) > 0

        wait_for(stuck, PATIENCE_S, "the line is full")
        assert sink.dropped["serial_busy"] > 0
        while terminal.read():
            pass
        data = read_until(terminal, sink, b"$FRM,%d" % (last + 1), begin=last + 1)
    numbers = [int(head.split(b",")[1]) for head in data.split(b"$FRM")[1:-1]]
    assert sum(number <= last for number in numbers) < last  # what waited was dropped


def test_of_several_cameras_one_is_sent(terminal):
    config = SerialSink(port=str(terminal.path), max_hz=1e6, camera="left")
    with open_sink(config, SinkContext(LABELS, cameras=("left", "right"))) as sink:
        data = bytearray()
        seq = iter(range(10**6))

        def step():
            for camera, even in (("left", 0), ("right", 1)):
                one = result(2 * next(seq) + even)
                sink.write(replace(one, frame=replace(one.frame, camera=camera)))
            data.extend(terminal.read())
            return data.count(b"\r\n") > 20

        wait_for(step, PATIENCE_S, "some frames")
    numbers = [int(head.split(b",")[1]) for head in data.split(b"$FRM")[1:-1]]
    assert numbers
    assert all(number % 2 == 0 for number in numbers)


def test_a_port_that_goes_away_while_it_takes_nothing_is_opened_again(terminal, monkeypatch):
    class Gone(serial.Serial):
        def write(self, data):
            raise serial.SerialTimeoutException("write timeout")

        def reset_output_buffer(self):
            raise termios.error(5, "Input/output error")

    with serial_sink(terminal) as sink:
        read_until(terminal, sink, b"$FRM")
        monkeypatch.setattr(serial, "Serial", Gone)
        terminal.unplug()
        terminal.plug()

        def missed():
            sink.write(result(0))
            return sink.dropped.get("serial_timeout", 0) > 0

        wait_for(missed, PATIENCE_S, "a frame that is not taken")
        monkeypatch.undo()
        assert b"$DET" in read_until(terminal, sink, b"$DET")


def test_the_mavlink_dialect_beats_and_tells_the_target(terminal):
    with serial_sink(terminal, dialect="mavlink") as sink:
        data = bytearray()

        def step():
            sink.write(result(1))
            data.extend(terminal.read())
            return {0, 111, 149, 275, 390} <= {number for number, _ in messages_in(bytes(data))}

        wait_for(step, PATIENCE_S, "all messages")
        answer = mavlink.encode(
            mavlink.TIMESYNC, {"tc1": 0, "ts1": 4242}, sequence=0, system=1, component=1
        )
        os.write(terminal.far, answer)

        def answered():
            data.extend(terminal.read())
            fields = [one for number, one in messages_in(bytes(data)) if number == 111]
            return any(one["ts1"] == (4242,) for one in fields)

        wait_for(answered, PATIENCE_S, "the answer to TIMESYNC")


def test_a_class_that_is_no_label_is_refused(tmp_path):
    config = SerialSink(port="/dev/null", heights_m={"cat": 0.3})
    with pytest.raises(PipelineError, match=r"'cat', which is none of the labels \(red, green\)"):
        open_sink(config, SinkContext(LABELS))


def test_a_port_that_is_not_there_yet_is_waited_for(tmp_path):
    config = SerialSink(port=str(tmp_path / "none"))
    with open_sink(config, SinkContext(LABELS)) as sink:
        sink.write(result(0))
        assert sink.dropped == {"serial_away": 1}
