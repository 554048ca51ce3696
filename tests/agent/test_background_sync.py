"""The thread that syncs and hashes a part file while more of it comes."""

import errno
import hashlib
import os
import random
import threading
from pathlib import Path
from unittest import mock

import pytest

from device.update.background_sync import BackgroundSync, Prefix


def test_the_prefix_is_what_is_written_without_a_hole() -> None:
    pieces = [(start, start + 10) for start in range(0, 500, 10)]
    random.Random(1).shuffle(pieces)
    prefix, written = Prefix(), set()
    for start, end in pieces:
        prefix.add(start, end)
        written.add(start)
        assert prefix.end == next(n for n in range(0, 510, 10) if n not in written)


def test_the_digest_is_that_of_the_file_in_whatever_order_it_was_written(tmp_path: Path) -> None:
    data = random.Random(2).randbytes(3_000_000)
    file = os.open(tmp_path / "part", os.O_RDWR | os.O_CREAT)
    background, prefix = BackgroundSync(file), Prefix()
    starts = list(range(0, len(data), 100_000))
    random.Random(3).shuffle(starts)
    for start in starts:
        piece = data[start : start + 100_000]
        os.pwrite(file, piece, start)
        prefix.add(start, start + len(piece))
        background.sync(prefix.end)
    assert background.digest(len(data)) == hashlib.sha256(data).hexdigest()
    os.close(file)


def test_a_disk_that_fails_is_noticed_at_the_next_sync_and_nobody_waits(tmp_path: Path) -> None:
    file = os.open(tmp_path / "part", os.O_RDWR | os.O_CREAT)
    failed = threading.Event()

    def fail(_file: int) -> None:
        failed.set()
        raise OSError(errno.EIO, "no")

    with mock.patch("os.fdatasync", fail):
        background = BackgroundSync(file)
        background.sync(0)
        assert failed.wait(30.0)
        with pytest.raises(OSError, match="no"):
            _sync_often(background)
        with pytest.raises(OSError, match="no"):
            background.digest(0)
    os.close(file)


def _sync_often(background: BackgroundSync) -> None:
    for _ in range(1000):
        background.sync(0)


def test_a_slow_disk_slows_down_what_writes(tmp_path: Path) -> None:
    file = os.open(tmp_path / "part", os.O_RDWR | os.O_CREAT)
    release, calls = threading.Semaphore(0), []

    def slow(_file: int) -> None:
        calls.append(1)
        release.acquire()

    with mock.patch("os.fdatasync", slow):
        background = BackgroundSync(file)
        third = threading.Thread(target=lambda: [background.sync(0) for _ in range(3)])
        third.start()
        third.join(0.2)
        assert third.is_alive()  # one is carried out, one waits, the third has no place
        for _ in range(3):
            release.release()
        third.join(30.0)
        assert not third.is_alive()
        background.close()
    assert len(calls) == 3
    os.close(file)
