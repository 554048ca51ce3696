"""A sink with a queue and a thread of its own, whose output takes nothing for a while."""

import threading

import pytest
from sink_fixtures import result
from video_fixtures import PATIENCE_S, wait_for

from pipelines.sinks.ros2_queue import QueuedSink


class Blocked(QueuedSink):
    """Its thread waits with the first frame in hand."""

    def __init__(self, drops, close_s=PATIENCE_S):
        super().__init__("test", 2, drops, close_s)
        self.is_open = threading.Event()
        self.sent = []

    def send(self, result):
        self.sent.append(result.frame.seq)
        self.is_open.wait(PATIENCE_S)
        if result.frame.seq == 0:
            raise OSError("the disk is full")

    def send_stats(self, stats):
        self.sent.append(stats)

    def close(self):
        self.sent.append("closed")


@pytest.mark.parametrize(("drops", "sent"), [("oldest", [0, 3, 4]), ("newest", [0, 1, 2])])
def test_a_full_queue_drops_the_oldest_or_the_newest(drops, sent):
    with Blocked(drops) as sink:
        sink.write(result(0))
        wait_for(lambda: sink.sent, PATIENCE_S, "the first frame in the thread")
        for seq in range(1, 5):
            sink.write(result(seq))
        sink.is_open.set()
    assert sink.sent == [*sent, "closed"]
    assert sink.dropped == {"test_queue": 2, "test_error": 1}


def test_what_is_not_sent_at_the_end_counts_as_dropped():
    sink = Blocked("oldest", close_s=0.0)
    with sink:
        sink.write(result(1))
        wait_for(lambda: sink.sent, PATIENCE_S, "the first frame in the thread")
        sink.write(result(2))
        sink.write(result(3))
    assert sink.dropped == {"test_queue": 2}
    sink.is_open.set()
    wait_for(lambda: sink.sent == [1, "closed"], PATIENCE_S, "the end of the thread")
