"""Ends recordings that a power cut left: cut after the last whole chunk, with an index."""

import fcntl
import io
import logging
import os
import struct
from collections import Counter, defaultdict
from pathlib import Path
from typing import BinaryIO

from mcap.data_stream import ReadDataStream, RecordBuilder
from mcap.opcode import Opcode
from mcap.records import (
    Channel,
    Chunk,
    ChunkIndex,
    DataEnd,
    Footer,
    Header,
    MessageIndex,
    Metadata,
    MetadataIndex,
    Schema,
    Statistics,
)
from mcap.writer import MCAP0_MAGIC

from pipelines.ros2.chunks import DAMAGE, unpack_chunk

LIBRARY = "tandem"  # in the header of our files
HEAD = struct.Struct("<BQ")  # opcode and length of each record
MESSAGE = struct.Struct("<HIQ")  # channel, sequence, log time

_log = logging.getLogger(__name__)


def finish_recording(path: Path) -> bool:
    """End a recording in its place; False: it was ended, is being written, cannot be ended, or is
    another program's, which may be writing it without a lock."""
    try:
        with path.open("r+b", buffering=1 << 20) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _finish(file)
    except BlockingIOError:
        return False
    except (OSError, *DAMAGE) as error:
        _log.warning("%s was not ended, and cannot be now: %s", path, error)
        return False


def _finish(file: BinaryIO) -> bool:
    size, head = file.seek(0, os.SEEK_END), len(MCAP0_MAGIC)
    file.seek(0)
    if file.read(head) != MCAP0_MAGIC:
        return False
    file.seek(size - head)
    if size > head and file.read(head) == MCAP0_MAGIC:
        return False
    file.seek(len(MCAP0_MAGIC) + HEAD.size)
    if Header.read(ReadDataStream(file)).library != LIBRARY:
        return False
    summary = _Summary()
    summary.read(file, size)
    file.truncate(summary.end)
    file.seek(summary.end)
    file.write(summary.encode())
    file.flush()
    os.fsync(file.fileno())
    return True


class _Summary:
    """What the records of a file hold that are whole; `end`: where they end."""

    def __init__(self) -> None:
        self.end = len(MCAP0_MAGIC)
        self._schemas: dict[int, Schema] = {}
        self._channels: dict[int, Channel] = {}
        self._counts: Counter[int] = Counter()
        self._chunks: list[ChunkIndex] = []
        self._metadata: list[MetadataIndex] = []
        self._indexes: list[MessageIndex] = []  # of the last chunk, those that the file lacks

    def read(self, file: BinaryIO, size: int) -> None:
        """Read records as far as they are whole. Raises one of DAMAGE if a chunk follows a damaged
        record: it would be cut off."""
        at, damage = self.end, None
        while at + HEAD.size <= size:
            file.seek(at)
            opcode, length = HEAD.unpack(file.read(HEAD.size))
            begin, at = at, at + HEAD.size + length
            if at > size or opcode in (Opcode.DATA_END, Opcode.FOOTER):
                break
            if damage is None:
                self.end = at
                try:
                    self._add(opcode, file, begin)
                except DAMAGE as error:
                    self.end, damage = begin, error
            elif opcode == Opcode.CHUNK:
                raise damage

    def _add(self, opcode: int, file: BinaryIO, begin: int) -> None:
        if opcode == Opcode.CHUNK:
            self._indexes = self._add_chunk(Chunk.read(ReadDataStream(file)), begin)
        elif opcode == Opcode.MESSAGE_INDEX:
            channel_id = MessageIndex.read(ReadDataStream(file)).channel_id
            self._indexes = [index for index in self._indexes if index.channel_id != channel_id]
            self._add_offset(channel_id, begin)
        elif opcode == Opcode.METADATA:
            name = Metadata.read(ReadDataStream(file)).name
            self._metadata.append(MetadataIndex(begin, self.end - begin, name))

    def _add_offset(self, channel_id: int, begin: int) -> None:
        chunk = self._chunks[-1]
        chunk.message_index_offsets[channel_id] = begin
        chunk.message_index_length += self.end - begin

    def _add_chunk(self, chunk: Chunk, begin: int) -> list[MessageIndex]:
        data = unpack_chunk(chunk)
        records: dict[int, list[tuple[int, int]]] = defaultdict(list)
        at = 0
        while at < len(data):
            opcode, length = HEAD.unpack_from(data, at)
            body = at + HEAD.size
            if opcode == Opcode.MESSAGE:
                channel_id, _, log_time = MESSAGE.unpack_from(data, body)
                records[channel_id].append((log_time, at))
            elif opcode in (Opcode.SCHEMA, Opcode.CHANNEL):
                self._add_definition(opcode, data[body : body + length])
            at = body + length
        self._chunks.append(
            ChunkIndex(
                chunk_start_offset=begin,
                chunk_length=self.end - begin,
                compression=chunk.compression,
                compressed_size=len(chunk.data),
                uncompressed_size=chunk.uncompressed_size,
                message_start_time=chunk.message_start_time,
                message_end_time=chunk.message_end_time,
                message_index_length=0,
                message_index_offsets={},
            )
        )
        self._counts.update({channel_id: len(rows) for channel_id, rows in records.items()})
        return [MessageIndex(channel_id, rows) for channel_id, rows in records.items()]

    def _add_definition(self, opcode: int, body: bytes) -> None:
        stream = ReadDataStream(io.BytesIO(body))
        if opcode == Opcode.SCHEMA:
            schema = Schema.read(stream)
            self._schemas[schema.id] = schema
        else:
            channel = Channel.read(stream)
            self._channels[channel.id] = channel

    def encode(self) -> bytes:
        """Return what follows `end`: indexes that are missing, summary and footer."""
        rest = RecordBuilder()
        for index in self._indexes:
            begin = rest.count
            index.write(rest)
            chunk = self._chunks[-1]
            chunk.message_index_offsets[index.channel_id] = self.end + begin
            chunk.message_index_length += rest.count - begin
        DataEnd(0).write(rest)
        summary_start = self.end + rest.count
        for record in (*self._schemas.values(), *self._channels.values()):
            record.write(rest)
        times = [(one.message_start_time, one.message_end_time) for one in self._chunks]
        Statistics(
            attachment_count=0,
            channel_count=len(self._channels),
            channel_message_counts=dict(self._counts),
            chunk_count=len(self._chunks),
            message_count=sum(self._counts.values()),
            message_start_time=min((begin for begin, _ in times), default=0),
            message_end_time=max((end for _, end in times), default=0),
            metadata_count=len(self._metadata),
            schema_count=len(self._schemas),
        ).write(rest)
        for one in (*self._chunks, *self._metadata):
            one.write(rest)
        Footer(summary_start, 0, 0).write(rest)
        return bytes(rest.end()) + MCAP0_MAGIC
