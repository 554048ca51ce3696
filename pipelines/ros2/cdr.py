"""CDR as ROS 2 has it on the wire (XCDR1, OMG DDS-XTypes 7.4.1): little endian written, both read.

A message is a mapping by field name; fields that are left out have the defaults of their type.
For each type a function is compiled from the definition. It packs every run of fields between two
sequences with one `struct.Struct`, kept by the run's place modulo 8 and the lengths of its strings.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from device.errors import PipelineError
from pipelines.ros2.messages import Field, fields_of

Message = Mapping[str, Any]
Write = Callable[[Message, int, Callable[[Any], None]], int]

HEAD = b"\0\1\0\0"  # plain CDR, little endian
MAX_TEMPLATES = 1024  # of one run; labels and track numbers have few lengths
LARGE = 8  # a message of more numbers that is left out is written as one constant

# struct's code of each primitive; its size is its alignment.
CODES: dict[str, str] = {
    "bool": "?", "byte": "B", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H",
    "int32": "i", "uint32": "I", "int64": "q", "uint64": "Q", "float32": "f", "float64": "d",
}  # fmt: skip
BYTES = ("byte", "uint8")


def encode(name: str, message: Message) -> bytes:
    """Return a message of the type `name` with its CDR head of 4 bytes.

    Sequences of bytes take any contiguous bytes-like object. Raises PipelineError: the type is
    unknown; struct.error: a number does not fit its field.
    """
    parts: list[Any] = [HEAD]
    _writer(name)(message, 0, parts.append)
    return b"".join(parts)


def decode(name: str, data: bytes | memoryview) -> dict[str, Any]:
    """Return a message with all its fields. Sequences of bytes are views of `data`, without a copy.

    Raises PipelineError: the data is no such message.
    """
    if len(data) < len(HEAD) or data[0] != 0 or data[1] not in (0, 1):
        raise PipelineError(
            f"a {name} begins with {bytes(data[:4]).hex()}, which is not plain CDR (0000 or 0001):"
            " the publisher must use XCDR1, as ROS 2 does."
        )
    reader = _Reader(memoryview(data).cast("B")[len(HEAD) :], "<" if data[1] else ">")
    try:
        return reader.message(name)
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise PipelineError(
            f"a {name} of {len(data)} bytes is damaged or of another version of the type ({error}):"
            " compare the type of the topic on both sides."
        ) from error


class _Reader:
    """Reads one message; struct.error and IndexError past its end."""

    def __init__(self, data: memoryview, order: str) -> None:
        self._data = data
        self._order = order
        self._at = 0

    def message(self, name: str) -> dict[str, Any]:
        """Return the message that begins here."""
        return {field.name: self._field(field) for field in fields_of(name)}

    def _field(self, field: Field) -> Any:  # noqa: ANN401  (what the definition says)
        if field.count is None and not field.is_sequence:
            return self._one(field.type)
        count = self._numbers("I", 1)[0] if field.count is None else field.count
        if field.type in CODES:
            if field.type in BYTES:
                return self._take(count)
            return list(self._numbers(CODES[field.type], count))
        if count > len(self._data) - self._at:
            raise IndexError(f"{field.name} announces {count} elements")
        return [self._one(field.type) for _ in range(count)]

    def _one(self, kind: str) -> Any:  # noqa: ANN401
        if kind in CODES:
            return self._numbers(CODES[kind], 1)[0]
        if kind == "string":
            return str(self._take(self._numbers("I", 1)[0])[:-1], "utf-8")
        return self.message(kind)

    def _numbers(self, code: str, count: int) -> Sequence[Any]:
        if count == 0:
            return ()
        size = struct.calcsize(f"={code}")
        self._at += -self._at % size
        return struct.unpack(f"{self._order}{count}{code}", self._take(size * count))

    def _take(self, size: int) -> memoryview:
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise IndexError(f"{self._at} bytes are needed")
        return self._data[start : self._at]


class _Run:
    """Fields between two sequences: the pieces of their format, and their values as source text."""

    def __init__(self) -> None:
        # A code; or "s", a string of a length in the key; or (code, number of values) of a message
        # that may be left out, by a number in the key: 0 is there.
        self.pieces: list[str | tuple[str, int]] = []
        self.values: list[str] = []
        self.keys: list[str] = []
        self.templates: dict[tuple[int, ...], struct.Struct] = {}

    def make(self, key: tuple[int, ...]) -> struct.Struct:
        """Return the template of a place modulo 8 and the lengths."""
        at, lengths = key[0], iter(key[1:])
        codes = ["<"]
        for piece in self.pieces:
            if piece == "s":
                length = next(lengths) + 1
                codes.append(f"{-at % 4}xI{length}s")
                at += -at % 4 + 4 + length
                continue
            code, count = (piece, 1) if isinstance(piece, str) else piece
            size = struct.calcsize(f"={code}")
            left_out = isinstance(piece, tuple) and next(lengths)
            codes.append(f"{-at % size}x" + (f"{size * count}s" if left_out else f"{count}{code}"))
            at += -at % size + size * count
        if len(self.templates) >= MAX_TEMPLATES:
            self.templates.clear()
        template = self.templates[key] = struct.Struct("".join(codes))
        return template


class _Source:
    """The source of a type's function `write(m, at, out) -> at`."""

    def __init__(self, name: str) -> None:
        self.lines = ["def write(m, at, out):"]
        self.names: dict[str, Any] = {"EMPTY": {}, "pack": _pack_numbers, "strings": _write_strings}
        self._count = 0
        self._run = _Run()
        self._fields(name, "m")
        self._end_run()
        self.lines.append(" return at")

    def _new(self, value: str) -> str:
        self._count += 1
        self.lines.append(f" v{self._count} = {value}")
        return f"v{self._count}"

    def _bind(self, prefix: str, value: object) -> str:
        name = f"{prefix}{len(self.names)}"
        self.names[name] = value
        return name

    def _fields(self, name: str, owner: str) -> None:
        for field in fields_of(name):
            if field.is_sequence:
                self._sequence(field, self._new(f"{owner}.get({field.name!r}, ())"))
            else:
                self._value(field, owner)

    def _value(self, field: Field, owner: str) -> None:
        run, get = self._run, f"{owner}.get({field.name!r}"
        if field.count is not None:
            run.pieces += [CODES[field.type]] * field.count
            run.values.append(f"*{get}, {(field.default,) * field.count!r})")
        elif field.type == "string":
            text = self._new(f"{get}, '').encode()")
            run.pieces.append("s")
            run.keys.append(f"len({text})")
            run.values.append(f"len({text}) + 1, {text}")
        elif not field.nested:
            run.pieces.append(CODES[field.type])
            run.values.append(f"{get}, {field.default!r})")
        elif len(codes := list(_codes(field.type))) > LARGE and len(set(codes)) == 1:
            self._large(field.type, codes, self._new(f"{get})"))
        else:
            self._fields(field.type, self._new(f"{get}, EMPTY)"))

    def _large(self, kind: str, codes: list[str], value: str) -> None:
        run = self._run
        run.pieces.append((codes[0], len(codes)))
        run.keys.append(f"{value} is None")
        default = self._bind("default", (encode(kind, {})[len(HEAD) :],))
        flat = self._bind("flat", _flattener(kind))
        run.values.append(f"*({default} if {value} is None else {flat}({value}))")

    def _sequence(self, field: Field, value: str) -> None:
        self._run.pieces.append("I")
        self._run.values.append(f"len({value})")
        self._end_run()
        if field.type in BYTES:
            self.lines.append(
                f" out(bytes({value}) if type({value}) in (list, tuple) else {value})"
            )
            self.lines.append(f" at += len({value})")
        elif field.type in CODES:
            self.lines.append(f" at = pack({CODES[field.type]!r}, {value}, at, out)")
        elif field.type == "string":
            self.lines.append(f" at = strings({value}, at, out)")
        else:
            write = self._bind("write", _writer(field.type))
            self.lines.append(f" for one in {value}: at = {write}(one, at, out)")

    def _end_run(self) -> None:
        run, self._run = self._run, _Run()
        if not run.pieces:
            return
        templates, make = self._bind("templates", run.templates), self._bind("make", run.make)
        self.lines += [
            f" key = ({', '.join(('at & 7', *run.keys))},)",
            f" template = {templates}.get(key) or {make}(key)",
            f" out(template.pack({', '.join(run.values)}))",
            " at += template.size",
        ]


@cache
def _writer(name: str) -> Write:
    source = _Source(name)
    exec("\n".join(source.lines), source.names)  # of our own table alone
    write: Write = source.names["write"]
    return write


def _codes(name: str) -> Iterator[str]:
    """Yield the codes of all numbers of a message; "" for what has no fixed size."""
    for field in fields_of(name):
        if field.is_sequence or field.type == "string":
            yield ""
        elif field.nested:
            yield from _codes(field.type)
        else:
            yield from [CODES[field.type]] * (field.count or 1)


def _flattener(name: str) -> Callable[[Message], list[Any]]:
    """Return what gives all numbers of a message of fixed size, in their order."""

    def flatten(message: Message) -> list[Any]:
        numbers: list[Any] = []
        for field, below in parts:
            if below is not None:
                numbers += below(message.get(field.name, {}))
            elif field.count is None:
                numbers.append(message.get(field.name, field.default))
            else:
                numbers += message.get(field.name, (field.default,) * field.count)
        return numbers

    parts = [(one, _flattener(one.type) if one.nested else None) for one in fields_of(name)]
    return flatten


def _pack_numbers(code: str, values: Sequence[Any], at: int, out: Callable[[Any], None]) -> int:
    if not len(values):
        return at
    pad = -at % struct.calcsize(f"={code}")
    data = struct.pack(f"<{pad}x{len(values)}{code}", *values)
    out(data)
    return at + len(data)


def _write_strings(values: Sequence[str], at: int, out: Callable[[Any], None]) -> int:
    for value in values:
        text = value.encode()
        data = struct.pack(f"<{-at % 4}xI{len(text) + 1}s", len(text) + 1, text)
        out(data)
        at += len(data)
    return at
