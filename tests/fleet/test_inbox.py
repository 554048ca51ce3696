"""Events between two threads."""

import threading
import time

from toolkit.fleet.server.inbox import Inbox

LIMIT, COUNT = 8, 1000


def test_all_events_come_in_order_though_the_sender_waits_for_room() -> None:
    inbox, taken = Inbox[int](LIMIT), list[int]()
    sender = threading.Thread(target=lambda: [inbox.put(number) for number in range(COUNT)])
    sender.start()
    until_s = time.monotonic() + 30.0
    while len(taken) < COUNT and time.monotonic() < until_s:
        events = inbox.take(5.0)
        assert len(events) <= LIMIT
        taken += events
    sender.join(30.0)
    assert taken == list(range(COUNT))


def test_a_full_inbox_is_taken_at_once_and_another_after_its_time() -> None:
    inbox, begun_s = Inbox[int](LIMIT), time.monotonic()
    inbox.put(1)
    assert (inbox.take(0.2), time.monotonic() - begun_s >= 0.2) == ([1], True)
    sender = threading.Thread(target=lambda: [inbox.put(number) for number in range(LIMIT)])
    sender.start()
    assert list(inbox.take(30.0)) == list(range(LIMIT))
    sender.join(30.0)
    assert time.monotonic() - begun_s < 20.0


def test_a_sender_that_waits_goes_on_once_nobody_takes() -> None:
    inbox = Inbox[int](1)
    sender = threading.Thread(target=lambda: [inbox.put(number) for number in range(3)])
    sender.start()
    time.sleep(0.1)
    assert sender.is_alive()
    inbox.close()
    sender.join(30.0)
    assert not sender.is_alive()
    assert list(inbox.take()) == [0]
