"""DLPack: arrays of other libraries as addresses, and ours for them.

Structures and rules: DLPack 1.1 (dlpack.h) and "Python Specification for DLPack" of the array API.
"""

import ctypes
from ctypes import (
    POINTER,
    c_char_p,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from typing import Any

import numpy as np

CUDA = 2  # kDLCUDA
CUDA_HOST = 3  # page-locked memory of the CPU
CUDA_MANAGED = 13
DEVICES = {1: "the CPU", CUDA: "a CUDA GPU", CUDA_HOST: "page-locked memory of the CPU",
           CUDA_MANAGED: "managed memory of CUDA"}  # fmt: skip
_KINDS = {"i": 0, "u": 1, "f": 2, "b": 6}  # kDLInt, kDLUInt, kDLFloat, kDLBool
_NAMES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_READ_ONLY = 1
_PLAIN, _VERSIONED = b"dltensor", b"dltensor_versioned"


class _Device(ctypes.Structure):
    _fields_ = (("kind", c_int32), ("index", c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("kind", c_uint8), ("bits", c_uint8), ("lanes", c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device", _Device),
        ("rank", c_int32),
        ("dtype", _Type),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("owner", c_void_p), ("deleter", _Deleter))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("owner", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    )


_CapsuleDestructor = ctypes.PYFUNCTYPE(None, c_void_p)
_new = ctypes.pythonapi.PyCapsule_New
_new.argtypes, _new.restype = (c_void_p, c_char_p, _CapsuleDestructor), ctypes.py_object
# The capsule as an address: its destructor must not take a reference.
_is_valid = ctypes.pythonapi["PyCapsule_IsValid"]
_is_valid.argtypes, _is_valid.restype = (c_void_p, c_char_p), ctypes.c_int
_pointer = ctypes.pythonapi["PyCapsule_GetPointer"]
_pointer.argtypes, _pointer.restype = (c_void_p, c_char_p), c_void_p


@dataclass(frozen=True, slots=True)
class DlTensor:
    """What a capsule says: strides in elements, None for C order."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    read_only: bool


def read_capsule(capsule: object) -> DlTensor | None:
    """Return what a capsule of `__dlpack__` holds, None if it is none or is used up.

    The tensor is valid as long as the capsule.
    """
    read_only = False
    if _is_valid(id(capsule), _VERSIONED):
        versioned = _ManagedVersioned.from_address(_pointer(id(capsule), _VERSIONED))
        read_only = bool(versioned.flags & _READ_ONLY)
        tensor = versioned.tensor
    elif _is_valid(id(capsule), _PLAIN):
        tensor = _Managed.from_address(_pointer(id(capsule), _PLAIN)).tensor
    else:
        return None
    rank = tensor.rank
    return DlTensor(
        (tensor.data or 0) + tensor.byte_offset,
        _type_name(tensor.dtype),
        tuple(tensor.shape[:rank]),
        tuple(tensor.strides[:rank]) if tensor.strides else None,
        read_only,
    )


_exported: dict[int, tuple[Any, ...]] = {}  # what consumers still use, by the tensor's address


def make_capsule(
    address: int, dtype: np.dtype[Any], shape: tuple[int, ...], index: int, owner: object
) -> object:
    """Return a capsule for `__dlpack__`: memory of GPU `index`, in C order; it keeps `owner`."""
    sizes = (c_int64 * max(len(shape), 1))(*shape)
    managed = _Managed(
        _Tensor(
            address,
            _Device(CUDA, index),
            len(shape),
            _Type(_KINDS[dtype.kind], dtype.itemsize * 8, 1),
            sizes,
            None,
            0,
        ),
        None,
        _DELETE,
    )
    place = ctypes.addressof(managed)
    _exported[place] = (managed, sizes, owner)
    capsule: object = _new(place, _PLAIN, _DESTROY)
    return capsule


def _delete(managed: int) -> None:
    """Let go of a tensor that its consumer does not need any more."""
    _exported.pop(managed, None)


def _destroy(capsule: int) -> None:
    """Let go of a tensor that nobody consumed: a consumer renames the capsule."""
    if _is_valid(capsule, _PLAIN):
        _delete(_pointer(capsule, _PLAIN))


_DELETE, _DESTROY = _Deleter(_delete), _CapsuleDestructor(_destroy)


def _type_name(dtype: _Type) -> str:
    """Return numpy's name of a type, or a name like bfloat16x2 for what numpy does not have."""
    name = _NAMES.get(dtype.kind, f"type{dtype.kind}:")
    if name == "bool" and dtype.bits == 8 and dtype.lanes == 1:
        return "bool"
    return f"{name}{dtype.bits}" + (f"x{dtype.lanes}" if dtype.lanes != 1 else "")
