"""Reads .npy and .npz files of others: sizes are judged before bytes are read or unpacked.

A header of 80 bytes can ask for exabytes, an archive of 1 MB unpack to 1 GB, and a pickle run code.
"""

import ast
import math
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from device.errors import ArrayFileError

Array = NDArray[Any]

MAX_HEADER_BYTES = 10_000  # as NumPy's own limit; a header is a shape and a type
MAX_MEMBERS = 100_000
MAX_RANK = 32
PIECE_BYTES = 1 << 20
_MAGIC = b"\x93NUMPY"
_LENGTHS = {1: "<H", 2: "<I", 3: "<I"}  # of the header, by version of the format
_ENCRYPTED = 0x1  # flag of a member
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}  # what numpy.savez writes
# What zipfile and NumPy raise on damaged files.
_DAMAGED = (
    ValueError,
    TypeError,
    SyntaxError,
    EOFError,
    OverflowError,
    MemoryError,
    RuntimeError,  # NotImplementedError and RecursionError, too
    LookupError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True, slots=True)
class Header:
    """The shape and the type of an array in the .npy format; `fortran`: stored by columns."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool

    @property
    def data_bytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(stream: IO[bytes]) -> Header:
    """Read the header of an array; the stream is then at its elements. Raises ArrayFileError."""
    try:
        head = stream.read(len(_MAGIC) + 2)
        if head[: len(_MAGIC)] != _MAGIC or head[6] not in _LENGTHS:
            raise ArrayFileError("it does not begin as an array")
        form = _LENGTHS[head[6]]
        (length,) = struct.unpack(form, stream.read(struct.calcsize(form)))
        if length > MAX_HEADER_BYTES:
            raise ArrayFileError(f"its header has {length} bytes, at most {MAX_HEADER_BYTES}")
        text = stream.read(length).decode("utf-8" if head[6] == 3 else "latin-1")
        fields = ast.literal_eval(text)
        dtype = np.lib.format.descr_to_dtype(fields["descr"])
        shape, fortran = fields["shape"], fields["fortran_order"]
    except _DAMAGED as error:
        raise ArrayFileError(f"its header is damaged ({type(error).__name__})") from error
    sizes = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
    if not sizes or len(shape) > MAX_RANK or type(fortran) is not bool:
        raise ArrayFileError("its header has no shape of numbers")
    if dtype.hasobject or dtype.fields is not None:
        raise ArrayFileError(f"it holds {dtype}, which is no plain type: pickles are not read")
    return Header(shape, dtype, fortran)


def read_array(stream: IO[bytes], stored_bytes: int, limit_bytes: int) -> Array:
    """Read an array of a stream of `stored_bytes`, header included. Raises ArrayFileError."""
    header = read_header(stream)
    if header.data_bytes > limit_bytes:
        raise ArrayFileError(
            f"{list(header.shape)} of {header.dtype} has {header.data_bytes} bytes, the limit is "
            f"{limit_bytes}"
        )
    stored = stored_bytes - stream.tell()
    if stored != header.data_bytes:
        raise ArrayFileError(
            f"{list(header.shape)} of {header.dtype} has {header.data_bytes} bytes, the file "
            f"{stored}"
        )
    try:
        data = _read(stream, header.data_bytes)
        flat = np.frombuffer(data, header.dtype)
        return flat.reshape(header.shape, order="F" if header.fortran else "C")
    except _DAMAGED as error:
        raise ArrayFileError(f"its elements are damaged ({error})") from error


def read_arrays(path: Path, limit_bytes: int) -> Array | dict[str, Array]:
    """Read the array of an .npy file, or those of an .npz file by name.

    Raises OSError, and ArrayFileError: it is neither, is damaged, encrypted or packed in another
    way than numpy.savez does, or unpacks to more than `limit_bytes`.
    """
    if not path.is_file():
        path.stat()  # says what is wrong
        raise ArrayFileError("it is no file")
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return read_npz(file, limit_bytes)
        file.seek(0)
        return read_array(file, path.stat().st_size, limit_bytes)


def read_npz(file: IO[bytes], limit_bytes: int) -> dict[str, Array]:
    """Read the arrays of an .npz file by name. Raises as `read_arrays`."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            total = sum(member.file_size for member in members)
            if total > limit_bytes or len(members) > MAX_MEMBERS:
                raise ArrayFileError(
                    f"its {len(members)} arrays have {total} bytes unpacked, the limit is "
                    f"{limit_bytes} and {MAX_MEMBERS} arrays"
                )
            return {_name(member): _member(archive, member, limit_bytes) for member in members}
    except _DAMAGED as error:
        raise ArrayFileError(f"it is no whole archive of arrays: {error}") from error


def open_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> IO[bytes]:
    """Open a member of an .npz file. Raises ArrayFileError: it is encrypted, or packed otherwise.

    Reading it raises what zipfile raises.
    """
    if member.flag_bits & _ENCRYPTED:
        raise ArrayFileError(f"{member.filename!r} is encrypted")
    if member.compress_type not in _METHODS:
        raise ArrayFileError(f"{member.filename!r} is packed by method {member.compress_type}")
    return archive.open(member)


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, limit_bytes: int) -> Array:
    with open_member(archive, member) as stream:
        try:
            return read_array(stream, member.file_size, limit_bytes)
        except ArrayFileError as error:
            raise ArrayFileError(f"{member.filename!r}: {error}") from error


def _name(member: zipfile.ZipInfo) -> str:
    if not member.filename.endswith(".npy"):
        raise ArrayFileError(f"{member.filename!r} is no array: write it with numpy.savez")
    return member.filename.removesuffix(".npy")


def _read(stream: IO[bytes], count: int) -> bytearray:
    """Read in pieces: memory is taken for what is there."""
    data = bytearray()
    while len(data) < count:
        piece = stream.read(min(PIECE_BYTES, count - len(data)))
        if not piece:
            raise EOFError(f"{len(data)} of {count} bytes")
        data += piece
    return data
