"""Standard output belongs to the result: what native libraries print there goes to standard error.

HiGHS, onnxruntime, FFmpeg and compilers write to file descriptor 1 past `sys.stdout`, when and what
they like. A redirection while one of them runs would catch the output of other threads; so the
descriptor is moved once, before the first thread. What a package prints while it is imported, such
as a banner, goes to standard error by an import hook: there is no other place to catch it.
"""

import contextlib
import fcntl
import io
import os
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from device.errors import TandemError


class StdoutError(TandemError):
    """Standard output cannot be written. A broken pipe stays a BrokenPipeError: nobody reads."""


def take_stdout() -> int:
    """Return a descriptor of the standard output, and let descriptor 1 be standard error.

    Python's `sys.stdout` then prints to standard error, too. Children do not inherit the returned
    descriptor. Raises OSError if standard output is closed.
    """
    result = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)  # 2 may be free
    try:
        os.dup2(2, 1)
    except OSError:  # standard error is closed: nobody wants to read it
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
    return result


def reserve_stdout() -> None:
    """Give standard output to `sys.stdout` alone; nothing if it is closed or replaced."""
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper) or stream is not sys.__stdout__:
        return
    stream.flush()
    sys.meta_path.insert(0, _MarksImports())
    sys.stdout = _Result(
        io.BufferedWriter(_Descriptor(take_stdout(), "wb")),  # Python flushes it at the end
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
    )


def drop_unwritten() -> None:
    """Let what `sys.stdout` could not write go nowhere: Python tries again when it ends."""
    try:
        if sys.stdout is not None:  # closed
            sys.stdout.flush()
    except (StdoutError, BrokenPipeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class _Descriptor(io.FileIO):
    """The descriptor of the result."""

    def write(self, data: Any) -> int:  # noqa: ANN401  (a buffer, which has no type before 3.12)
        """Write bytes; raises StdoutError and BrokenPipeError."""
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as err:
            raise StdoutError(
                f"standard output cannot be written: {err.strerror}; the result is incomplete: "
                "free space, or write it elsewhere"
            ) from err


class _Importing(threading.local):
    depth = 0  # of modules that this thread executes


_IMPORTING = _Importing()


class _Result(io.TextIOWrapper):
    """The result; what a thread prints while it imports a module goes to standard error."""

    def write(self, text: str) -> int:
        """Write text; see the class."""
        if not _IMPORTING.depth:
            return super().write(text)
        return len(text) if sys.stderr is None else sys.stderr.write(text)


class _MarksImports:
    """A finder of `sys.meta_path` that finds as those behind it do; modules say that they load."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the finders behind this one give."""
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (f.find_spec(name, path, target) for f in behind if hasattr(f, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        loader = None if spec is None else spec.loader
        # A class is a loader of built-in modules: no file, no banner.
        if loader is not None and not isinstance(loader, type) and hasattr(loader, "exec_module"):
            _mark(loader)
        return spec


def _mark(loader: Any) -> None:  # noqa: ANN401
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        _IMPORTING.depth += 1
        try:
            execute(module)
        finally:
            _IMPORTING.depth -= 1

    # On this loader alone: resources and tracebacks ask for its class.
    with contextlib.suppress(AttributeError):
        loader.exec_module = exec_module


def result_descriptor() -> int:
    """Return the descriptor that `sys.stdout` writes to, for a child that writes the result."""
    sys.stdout.flush()
    try:
        return sys.stdout.fileno()
    except OSError:  # replaced by a buffer
        return 1
