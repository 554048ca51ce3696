"""Provisioning at the line: rows of boards in, a row of results out for each.

The file of results is only ever added to, a whole line at a time: a run that was cut off goes on
where it was, and boards that are done are left alone.
"""

import csv
import datetime as dt
import fcntl
import io
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from device.errors import TandemError
from toolkit.errors import BoardError, FleetError
from toolkit.fleet.authority import check_device
from toolkit.fleet.boards.request import parse_labels

INPUT = ("serial", "device", "address", "profile", "group", "labels")
OUTPUT = (
    *("serial", "device", "result", "reason", "attempts", "certificate", "bundle", "sha256"),
    *("address", "ended", "duration_s"),
)
OK, FAILED = "ok", "failed"
MAX_ROWS = 100_000


@dataclass(frozen=True, slots=True)
class LineRow:
    """A board that shall be provisioned. `address`: "" for the USB network."""

    serial: str
    device: str
    address: str = ""
    profile: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Provisioned:
    """What a board has now. `certificate`: its serial number; `bundle`: name and version."""

    certificate: str = ""
    bundle: str = ""
    sha256: str = ""
    address: str = ""


@dataclass(frozen=True, slots=True)
class LineResult:
    """How a row ended."""

    row: LineRow
    result: str
    reason: str
    attempts: int
    provisioned: Provisioned
    ended: str
    duration_s: float

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the row of results, each on one line."""
        board = self.provisioned
        cells = (
            *(self.row.serial, self.row.device, self.result, self.reason, str(self.attempts)),
            *(board.certificate, board.bundle, board.sha256, board.address or self.row.address),
            *(self.ended, f"{self.duration_s:.1f}"),
        )
        return tuple(" ".join(cell.split()) for cell in cells)


def parse_rows(text: str, name: str) -> tuple[LineRow, ...]:
    """Return the rows of a CSV file; BoardError names the line and what is wrong with it."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        columns = reader.fieldnames or []
        unknown = sorted(set(columns) - set(INPUT))
        if "serial" not in columns or unknown or len(columns) != len(set(columns)):
            what = (
                f"has the column {unknown[0]!r}" if unknown else "has no column serial of its own"
            )
            raise BoardError(f"{name} {what}: the first line names columns of {', '.join(INPUT)}")
        rows: list[LineRow] = []
        for row in reader:
            if len(rows) >= MAX_ROWS:
                raise BoardError(f"{name} has more than {MAX_ROWS} rows: cut it into several")
            rows.append(_row(row, f"{name}, line {reader.line_num}"))
    except csv.Error as error:
        raise BoardError(f"{name}, line {reader.line_num}: {error}") from error
    _check_distinct(rows, name)
    return tuple(rows)


def _row(cells: Mapping[str | None, str | list[str] | None], place: str) -> LineRow:
    if None in cells or None in cells.values():
        raise BoardError(f"{place}: it has another number of cells than the first line")
    text = {str(key): str(value).strip() for key, value in cells.items()}
    if not text["serial"]:
        raise BoardError(f"{place}: the serial number is empty")
    device = text.get("device") or text["serial"]
    try:
        check_device(device)
        labels = parse_labels([row for row in text.get("labels", "").split(";") if row.strip()])
    except (FleetError, BoardError) as error:
        raise BoardError(f"{place}: {error}") from error
    if text.get("group"):
        labels["group"] = text["group"]
    address, profile = text.get("address", ""), text.get("profile", "")
    return LineRow(text["serial"], device, address, profile, labels)


def _check_distinct(rows: Sequence[LineRow], name: str) -> None:
    """Refuse two boards of one name: the second would take the place of the first."""
    for kind in ("serial", "device"):
        for value, count in Counter(getattr(row, kind) for row in rows).items():
            if count > 1:
                raise BoardError(f"{name} has the {kind} {value!r} twice: each is one board")


class ResultFile:
    """The file of results; `close` it. One run at a time writes to it."""

    def __init__(self, path: Path) -> None:
        """Open or make it. BoardError: another run has it, or it is a file of another kind."""
        self.path = path
        self._lock = threading.Lock()
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise BoardError(f"cannot write {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.done = self._read()
        except BlockingIOError as error:
            os.close(self._handle)
            raise BoardError(f"another run writes {path}: wait for its end") from error
        except OSError as error:
            os.close(self._handle)
            raise BoardError(f"cannot write {path}: {error.strerror}") from error
        except BaseException:
            os.close(self._handle)
            raise

    def _read(self) -> frozenset[str]:
        """Return the serial numbers that are done; what a power cut left of a line is cut off."""
        content = os.pread(self._handle, os.fstat(self._handle).st_size, 0)
        whole = content[: content.rfind(b"\n") + 1]
        try:
            rows = list(csv.reader(io.StringIO(whole.decode(), newline=""), strict=True))
        except (ValueError, csv.Error) as error:
            raise BoardError(f"{self.path} is no file of results: {error}") from error
        if (rows and tuple(rows[0]) != OUTPUT) or (
            not rows and len(content) > len(",".join(OUTPUT))
        ):
            raise BoardError(
                f"{self.path} is no file of results, whose columns are {', '.join(OUTPUT)}: name "
                "another one with --out"
            )
        os.ftruncate(self._handle, len(whole))
        if not rows:
            self._append(OUTPUT)
        last = {row[0]: row[2] for row in rows[1:] if len(row) == len(OUTPUT)}
        return frozenset(serial for serial, result in last.items() if result == OK)

    def add(self, result: LineResult) -> None:
        """Add a line, and bring it onto the disk. BoardError: it does not take it."""
        try:
            self._append(result.cells())
        except OSError as error:
            raise BoardError(f"cannot write {self.path}: {error.strerror}") from error

    def _append(self, cells: Iterable[str]) -> None:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerow(cells)
        rest = text.getvalue().encode()
        with self._lock:
            while rest:
                rest = rest[os.write(self._handle, rest) :]
            os.fsync(self._handle)

    def close(self) -> None:
        """Close it."""
        os.close(self._handle)


def provision_rows(
    rows: Sequence[LineRow],
    results: ResultFile,
    provision: Callable[[LineRow], Provisioned],
    *,
    retries: int,
    jobs: int,
    on_result: Callable[[LineResult], None],
) -> tuple[LineResult, ...]:
    """Provision the rows that are not done, `jobs` at once; each has `1 + retries` attempts.

    Raises BoardError: the file of results cannot be written. KeyboardInterrupt: attempts that have
    begun are waited for, and no other one begins.
    """
    stopped = threading.Event()

    def run(row: LineRow) -> LineResult:
        result = _attempt(row, provision, retries, stopped)
        results.add(result)
        on_result(result)
        return result

    pending = [row for row in rows if row.serial not in results.done]
    pool = ThreadPoolExecutor(jobs)
    try:
        return tuple(pool.map(run, pending))
    except BaseException:
        stopped.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _attempt(
    row: LineRow,
    provision: Callable[[LineRow], Provisioned],
    retries: int,
    stopped: threading.Event,
) -> LineResult:
    begun_s, reason, attempts = time.monotonic(), "", 0
    provisioned, result = Provisioned(), FAILED
    while result == FAILED and attempts <= retries and not (attempts and stopped.is_set()):
        attempts += 1
        try:
            provisioned, result, reason = provision(row), OK, ""
        except TandemError as error:
            reason = str(error)
    return LineResult(
        row=row,
        result=result,
        reason=reason,
        attempts=attempts,
        provisioned=provisioned,
        ended=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        duration_s=time.monotonic() - begun_s,
    )
