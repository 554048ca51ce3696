"""Measure downloads: speed, use of a slow line, differences and resumption.

    python -m scripts.bench_transfer [--mib 128] [--runs 5] [--parts loopback wan ...] [--json FILE]

A real mosquitto, a chunk server and the device's download code, each a process of its own, on this
machine. Beside each figure stands its goal and its anchor: what others reach, or what the first
prototype did. The best of several runs is shown with the median, as other work on the machine only
ever slows a run.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from device.update.bundle import write_bundle
from device.update.byte_source import FileBytes
from device.update.delta import decode_delta
from scripts.transfer_parts import (
    Download,
    begin,
    chunk_server,
    device,
    line,
    mosquitto,
    result_of,
)
from toolkit.fleet.bundles.blob import Blob
from toolkit.fleet.bundles.delta import DeltaEncoder

Tensors = dict[str, npt.NDArray[Any]]
MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `goal` and `anchor` are texts; `ours` is in `unit`, `median` of all runs."""

    name: str
    unit: str
    goal: str
    anchor: str
    ours: float
    median: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Bench:
    """What the parts share."""

    folder: Path
    mib: int
    runs: int
    tensors: int


# -- models


def network(mib: float, tensors: int, chance: np.random.Generator) -> Tensors:
    """Return random-normal weights of a detector; its head has 2.6 % of the bytes."""
    total = int(mib * MIB / 4)
    sizes = np.linspace(1, 3, tensors - 1)
    sizes = (sizes / sizes.sum() * total * 0.974).astype(int)
    table: Tensors = {}
    for number, size in enumerate(sizes):
        table[f"block{number:02}.weight"] = chance.normal(0, 0.05, size).astype(np.float32)
        table[f"block{number:02}.bias"] = chance.normal(0, 0.05, 64).astype(np.float32)
    table["head.weight"] = chance.normal(0, 0.05, int(total * 0.026)).astype(np.float32)
    return table


def moved(table: Tensors, chance: np.random.Generator, share: float = 0.01) -> Tensors:
    """Return the weights after each has moved by a share of their standard deviation."""
    after: Tensors = {}
    for name, weights in table.items():
        values = weights.astype(np.float32)
        noise = chance.normal(0.0, share * float(values.std()), values.shape)
        after[name] = (values + noise).astype(np.float32)
    return after


def to_int8(table: Tensors, scales: dict[str, float]) -> Tensors:
    """Return the weights in INT8 with these scales."""
    return {
        name: np.clip(np.round(value / scales[name]), -127, 127).astype(np.int8)
        for name, value in table.items()
    }


def write_model(path: Path, table: Tensors, metadata: str = "m") -> Path:
    """Write a bundle with these tensors in its engine."""
    from safetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    engine, text = path.with_suffix(".e"), path.with_suffix(".t")
    save_file(table, engine, {"manifest": metadata})
    text.write_text("x\n")
    write_bundle(
        path, engine=engine, pipeline=text, labels=text, name="m", version="1", profile="p"
    )
    engine.unlink()
    return path


def random_bundle(path: Path, mib: float) -> Path:
    """Write a bundle that does not compress."""
    chance = np.random.default_rng(0)
    return write_model(path, {"w": chance.integers(0, 256, int(mib * MIB), np.uint8)})


# -- the parts


def loopback(bench: Bench) -> Iterator[Row]:
    """One device, everything on this machine."""
    targets = bench.folder / "targets"
    blob = Blob(random_bundle(targets / "x.bundle", bench.mib))
    goals = {0: (">= 150", "131-175, fixed window"), 1: (">= 120", "3-4 plain, 122-135 tuned")}
    with mosquitto(bench.folder) as port:
        for qos, (goal, anchor) in goals.items():
            with chunk_server(targets, port, qos):
                results = [
                    _fetch(blob, bench.folder / f"q{qos}-{run}", port, qos=qos)
                    for run in range(bench.runs + 1)
                ][1:]  # the server opens the bundle in the first
            yield _rate_row(f"download, QoS {qos}", goal, anchor, results)
        stick = [
            _fetch(blob, bench.folder / f"f-{run}", port, places=(str(targets),))
            for run in range(bench.runs)
        ]
        yield _rate_row("download from a folder", "-", "-", stick)
    blob.close()


def wan(bench: Bench) -> Iterator[Row]:
    """One device behind a line with delay and rate."""
    targets = bench.folder / "targets"
    lines = (("100 Mbit/s, 40 ms", 12.5e6, 0.04, 98), ("20 Mbit/s, 200 ms", 2.5e6, 0.2, 97))
    for name, bytes_per_s, rtt_s, goal in lines:
        blob = Blob(random_bundle(targets / "w.bundle", min(bench.mib, bytes_per_s * 10 / MIB)))
        shares, sustained = [], []
        with mosquitto(bench.folder) as port, chunk_server(targets, port):
            _fetch(blob, bench.folder / "warm", port)
            with line(port, bytes_per_s=bytes_per_s, rtt_s=rtt_s) as far_port:
                for run in range(max(1, bench.runs // 2)):
                    result = _fetch(blob, bench.folder / f"w-{rtt_s}-{run}", far_port)
                    shares.append(100 * result.bytes / result.seconds / bytes_per_s)
                    sustained.append(100 * result.sustained / bytes_per_s)
        anchor = f"{98.8 if rtt_s < 0.1 else 97.0} fixed window; ~24 with 128 KB a request"
        unit = "% of the line"
        yield _row(f"use of {name}", unit, f">= {goal}", anchor, sustained, best=max)
        note = f"{blob.spec.bytes / 1e6:.0f} MB with the start, the last sync and the comparison"
        yield _row("the same, all of a download", unit, "-", "-", shares, best=max, note=note)
        blob.close()


def delta(bench: Bench) -> Iterator[Row]:
    """What is sent to a device that has an older bundle, and the time that it takes."""
    chance = np.random.default_rng(0)
    base = network(bench.mib, bench.tensors, chance)
    head = {**base, "head.weight": (base["head.weight"] * 1.1).astype(np.float32)}
    after = moved(base, chance)
    scales = {name: float(np.abs(value).max()) / 127 for name, value in base.items()}
    halves = [{n: v.astype(np.float16) for n, v in t.items()} for t in (base, after)]
    cases: tuple[tuple[str, str, str, Tensors, Tensors, str], ...] = (
        ("FP32, head only", "<= 3", "2.4-2.7", base, head, "m"),
        ("FP32, head, header 356 B longer", "<= 3", "2.7", base, head, "m" * 357),
        ("FP16, all moved 1 %", "<= 57", "57", halves[0], halves[1], "m"),
        ("INT8, all moved 1 %", "<= 22", "22", to_int8(base, scales), to_int8(after, scales), "m"),
        ("FP32, all moved 1 %", "-", "68", base, after, "m"),
    )
    for number, (name, goal, anchor, before, then, metadata) in enumerate(cases):
        folder = bench.folder / f"delta{number}"
        yield from _delta_rows(
            name,
            goal,
            anchor,
            write_model(folder / "1.bundle", before),
            write_model(folder / "2.bundle", then, metadata),
        )


def resume(bench: Bench) -> Iterator[Row]:
    """A device that is killed with SIGKILL again and again."""
    targets = bench.folder / "targets"
    blob = Blob(random_bundle(targets / "r.bundle", bench.mib))
    again, kills = [], 0
    with mosquitto(bench.folder) as port, chunk_server(targets, port):
        for run in range(bench.runs):
            folder = bench.folder / f"resume-{run}"
            on_disk = 0
            while True:
                with device(blob.spec, folder, port) as process:
                    before = _whole_chunks(blob, folder)
                    again.append(max(0, on_disk - before))  # what was on the disk and is not now
                    begin(process)
                    if kills % 4 != 3:
                        time.sleep(random.uniform(0.05, 0.4))
                        process.kill()
                        process.wait()
                        kills += 1
                        on_disk = _whole_chunks(blob, folder)
                        continue
                    result = result_of(process)
                    sent = result.received - len(blob.index) * (result.received > blob.spec.bytes)
                    again.append(max(0, sent - (blob.spec.bytes - before)))
                    kills += 1
                break
    note = f"{kills - bench.runs} kills"
    yield _row(
        "bytes sent again after SIGKILL", "bytes", "0", "the file", again, best=max, note=note
    )
    blob.close()


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "loopback": loopback,
    "wan": wan,
    "delta": delta,
    "resume": resume,
}


def _fetch(
    blob: Blob, folder: Path, port: int, *, qos: int = 0, places: tuple[str, ...] = ("mqtt",)
) -> Download:
    with device(blob.spec, folder, port, qos=qos, places=places) as process:
        begin(process)
        result = result_of(process)
    for path in folder.iterdir():
        path.unlink()
    return result


def _whole_chunks(blob: Blob, folder: Path) -> int:
    """Return the bytes of the chunks that a part file has whole."""
    path = folder / f"{blob.spec.sha256}.part"
    if not path.exists():
        return 0
    file = FileBytes(path)
    table = blob.table
    whole = sum(
        table.size(n)
        for n in range(table.count)
        if table.fits(n, file.read(table.starts[n], table.size(n)))
    )
    file.close()
    return whole


def _delta_rows(name: str, goal: str, anchor: str, base: Path, bundle: Path) -> Iterator[Row]:
    blob, base_file = Blob(bundle), FileBytes(base)
    known = set(_hashes(base))
    table = blob.table
    missing = [n for n in range(table.count) if table.digest(n) not in known]
    encoder = DeltaEncoder(blob.file, base_file)
    started_s = time.perf_counter()
    payloads = [encoder.encode(table.starts[n], table.size(n)) for n in missing]
    encode_s = time.perf_counter() - started_s
    sent = len(blob.index)
    started_s = time.perf_counter()
    for number, payload in zip(missing, payloads, strict=True):
        sent += table.size(number) if payload is None else len(payload)
        if payload is not None:
            chunk = decode_delta(payload, table.size(number), [base_file])
            if not table.fits(number, chunk):
                raise SystemExit(f"{name}: a difference does not make its chunk")
    decode_s = time.perf_counter() - started_s
    share = 100 * sent / blob.spec.bytes
    note = (
        f"{blob.spec.bytes / 1e6:.1f} MB; the host makes it in {encode_s:.2f} s, the device "
        f"applies it in {decode_s:.2f} s"
    )
    yield _row(f"sent: {name}", "% of the bundle", goal, anchor, [share], best=min, note=note)
    base_file.close()
    blob.close()


def _hashes(path: Path) -> Iterator[bytes]:
    blob = Blob(path)
    yield from (blob.table.digest(number) for number in range(blob.table.count))
    blob.close()


def _rate_row(name: str, goal: str, anchor: str, results: list[Download]) -> Row:
    rates = [result.bytes / result.seconds / 1e6 for result in results]
    cpu_s = min(result.cpu_s * 1e9 / result.bytes for result in results)
    note = f"{results[0].bytes / 1e6:.0f} MB; the device takes {cpu_s:.1f} cpu-s a GB"
    return _row(name, "MB/s", goal, anchor, rates, best=max, note=note)


def _row(
    name: str,
    unit: str,
    goal: str,
    anchor: str,
    values: list[float] | list[int],
    *,
    best: Callable[[list[float]], float],
    note: str = "",
) -> Row:
    numbers = [float(value) for value in values]
    return Row(name, unit, goal, anchor, best(numbers), statistics.median(numbers), note)


def main() -> None:
    """Run the parts and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=128, help="size of a bundle (default: 128)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args()
    rows: list[Row] = []
    print("| figure | unit | goal | anchor | best | median | |\n|---|---|---|---|--:|--:|---|")
    for part in arguments.parts:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder), arguments.mib, arguments.runs, 54)
            for row in PARTS[part](bench):
                rows.append(row)
                print(
                    f"| {row.name} | {row.unit} | {row.goal} | {row.anchor} | {row.ours:.4g} | "
                    f"{row.median:.4g} | {row.note} |",
                    flush=True,
                )
    if arguments.json is not None:
        figures = {"python": sys.version.split()[0], "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
