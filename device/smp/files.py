"""SMP's file group: a few read-only files that the agent makes when they are asked for.

Nothing of the board's disk can be named: the table of files is fixed.
"""

import hashlib
import zlib
from collections.abc import Callable, Mapping

from device.smp.cbor import Scalar, Value
from device.smp.message import Code, SmpError

MAX_READERS = 8
_PLAIN_BYTES = 256  # of an answer beside its data


class Files:
    """Files by their paths. A download reads what the file had when it began."""

    def __init__(self, files: Mapping[str, Callable[[], bytes]]) -> None:
        self._files = files
        self._opened: dict[tuple[object, str], bytes] = {}

    def download(
        self, peer: object, request: Mapping[str, Scalar], buffer_bytes: int
    ) -> dict[str, Value]:
        """Answer a piece of a file: command 0."""
        name, offset = _name(request), request.get("off", 0)
        if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
            raise SmpError(Code.INVALID, "off is no number from 0 on")
        key = peer, name
        if offset == 0 or key not in self._opened:
            content = self._read(name)
            others = [row for row in self._opened.items() if row[0] != key]
            self._opened = dict([*others[1 - MAX_READERS :], (key, content)])
        content = self._opened[key]
        if offset > len(content):
            raise SmpError(Code.INVALID, f"{name} has {len(content)} bytes, not {offset}")
        data = content[offset : offset + max(1, buffer_bytes - _PLAIN_BYTES)]
        if offset:
            return {"off": offset, "data": data}
        return {"off": offset, "data": data, "len": len(content)}

    def status(self, _peer: object, request: Mapping[str, Scalar]) -> dict[str, Value]:
        """Answer the length of a file: command 1."""
        return {"len": len(self._read(_name(request)))}

    def checksum(self, _peer: object, request: Mapping[str, Scalar]) -> dict[str, Value]:
        """Answer the SHA-256 or CRC-32 of a file: command 2."""
        kind, content = request.get("type") or "sha256", self._read(_name(request))
        if kind not in ("sha256", "crc32"):
            raise SmpError(Code.NOT_SUPPORTED, f"there is no checksum {kind!r}: sha256 or crc32")
        output = hashlib.sha256(content).digest() if kind == "sha256" else zlib.crc32(content)
        return {"type": kind, "len": len(content), "output": output}

    def checksums(self, _peer: object, _request: Mapping[str, Scalar]) -> dict[str, Value]:
        """Answer which checksums there are: command 3."""
        return {"types": {"sha256": {"format": 1, "size": 32}, "crc32": {"format": 0, "size": 4}}}

    def close(self, peer: object, _request: Mapping[str, Scalar]) -> dict[str, Value]:
        """Forget what a client reads: command 4."""
        self._opened = {key: data for key, data in self._opened.items() if key[0] != peer}
        return {}

    def _read(self, name: str) -> bytes:
        read = self._files.get(name)
        if read is None:
            names = ", ".join(self._files)
            raise SmpError(Code.NO_ENTRY, f"there is no file {name!r}: this board gives {names}")
        return read()


def _name(request: Mapping[str, Scalar]) -> str:
    name = request.get("name")
    if not isinstance(name, str):
        raise SmpError(Code.INVALID, "name is no text")
    return name
