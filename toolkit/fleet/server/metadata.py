"""Answers the devices' requests for files of the signed repository, over MQTT.

It keeps nothing, and what it sends is signed, so that nothing depends on who answers.
"""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from device.protocol.documents import TufGet, TufReply, decode
from device.protocol.mqtt import Link, Message
from device.protocol.topics import PREFIX, Topics
from device.trust.exchange import PART_BYTES

LOG = logging.getLogger(__name__)
MAX_TARGET_BYTES = 256 * 1024  # director.json; bundles are sent in chunks
_FOLDERS = ("metadata", "targets")
_NAME = re.compile(r"[A-Za-z0-9_%+-][A-Za-z0-9_.%+-]*\Z")


class MetadataServer:
    """Serves one repository folder."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository

    def handle(self, link: Link, message: Message) -> bool:
        """Answer a request; False if the message is none."""
        device = message.topic.removeprefix(f"{PREFIX}/").removesuffix("/tuf/get")
        if message.topic != Topics(device).tuf_get:
            return False
        try:
            get = decode(message.payload, TufGet)
        except ValueError:
            return True
        for number, part in enumerate(self.answer(get.path)):
            link.publish_bulk(Topics(device).tuf_reply(get.id, number), part)
        return True

    def answer(self, path: str) -> Iterator[bytes]:
        """Yield the parts of the answer to a request for a path."""
        folder, *names = path.split("/")
        if folder not in _FOLDERS or not names or not all(map(_NAME.match, names)):
            yield _part(TufReply(status=400))
            return
        try:
            with (self._repository / path).open("rb") as file:
                if folder == "targets" and file.seek(0, 2) > MAX_TARGET_BYTES:
                    yield _part(TufReply(status=400))
                    return
                file.seek(0)
                data = file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            yield _part(TufReply(status=404))
            return
        except OSError as error:
            LOG.error("cannot read %s: %s", self._repository / path, error.strerror)
            yield _part(TufReply(status=500))
            return
        count = max(1, -(-len(data) // PART_BYTES))
        for number in range(count):
            start = number * PART_BYTES
            yield _part(TufReply(status=200, parts=count), data[start : start + PART_BYTES])


def _part(reply: TufReply, data: bytes = b"") -> bytes:
    return msgspec.json.encode(reply) + b"\n" + data
