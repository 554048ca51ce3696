"""A sink with a queue and a thread of its own, whose output takes nothing for a while."""

import threading

import pytest
from sink_fixtures import result
from video_fixtures import PATIENCE_S, wait_for

from pipelines.sinks.queued import QueuedSink


class Blocked(QueuedSink):
    """Its thread waits with the first frame in hand."""

    def __init__(self, drops):
        super().__init__("test", 2, drops, PATIENCE_S)
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
