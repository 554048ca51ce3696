"""Time networks on a board-sized slice of this machine's NVIDIA GPU and on all of it.

    python -m scripts.bench_slice FOLDER [--networks ...] [--batches 1 8] [--percent 12] [--jobs N]
        [--places slice whole] [--parts predicted tuned peers] [--precisions fp16 int8]
        [--code sm_80]

A Jetson's GPU has 8 to 20 SMs, where arithmetic and memory bound what launches bound on a server.
The slice is a share of the SMs for each process, by NVIDIA's Multi-Process Service, whose daemon
runs in a folder of its own and is ended after the run; no setting of the GPU is changed. Memory and
L2 cache stay whole. In one run, for slice and whole GPU: the rooflines (products and copies as
measured), engines built for that many SMs, in FP16 and INT8, with the tactics that the host
predicted and with the fastest ones as timed, and PyTorch eager and compiled; each as a CUDA graph;
and for how many operations the predicted tactic is among the fastest.
FOLDER keeps engines and, as JSON, every figure and every operation, so that parts may be measured
one after the other (PyTorch may want another Triton); the printed tables have all that is there of
the slice and the whole GPU. Slices of several sizes may share a folder, and so may kernels
compiled as for an older GPU with `--code` (`scripts/older_code.py`): Orin's take `mma.sync`.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path

import msgspec

from device.engine.file import open_engine
from device.profile import PROFILES
from device.runtime.cuda.tactics import choices_of, kernels_of
from device.runtime.timing_cache import read_timings
from scripts.gpu_table import Cells, Layer, Run, merged
from scripts.older_code import CODES, compiling_older, name_gpu

NETWORKS = (
    "mobilenet_v2", "mobilenet_v3_large", "mobilenetv4_conv_small", "ghostnet_100",
    "efficientnet_b0", "resnet18", "resnet50", "resnext50_32x4d", "regnet_y_800mf", "densenet121",
    "convnext_nano", "efficientvit_b1", "swin_t", "vit_small", "yolo8n",
)  # fmt: skip
PRECISIONS = ("fp16", "int8")
DEAREST = 10  # operations of a network whose share of the roofline is summed up
PLACES = ("slice", "whole")
PARTS = ("predicted", "tuned", "peers")
SERVER_SM = 90
CLOSE = 1.05  # times the fastest tactic


def file_prefix(place: str, percent: int, code: str | None = None) -> str:
    """Return how the names of a place's files begin; with `code`, those of its engines."""
    prefix = f"slice{percent}" if place == "slice" else place
    return prefix if code is None else f"{prefix}_{code}"


@contextmanager
def gpu_slice(percent: int) -> Iterator[dict[str, str]]:
    """Yield the environment of processes that get this share of the SMs, from a daemon for them."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        daemon = {
            **os.environ,
            "CUDA_MPS_PIPE_DIRECTORY": folder,
            "CUDA_MPS_LOG_DIRECTORY": folder,
        }
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=daemon, check=True)
        try:
            yield {**daemon, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)}
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], env=daemon, input=b"quit\n", check=True)


def bench(environment: Mapping[str, str], out: Path, *arguments: object) -> Run:
    """Run `scripts/bench_gpu.py` in a process of its own; return what it measured."""
    command = [sys.executable, "-m", "scripts.bench_gpu", "--jobs", "0", "--json", out, *arguments]
    subprocess.run(list(map(str, command)), env=dict(environment), check=True)
    return msgspec.json.decode(out.read_bytes(), type=Run)


def slice_profile(path: Path, limits: Run, code: str | None = None) -> Path:
    """Write the profile of a server's GPU with the SMs and the bandwidth of `limits`.

    `code`: what its kernels are compiled for, where that is not the server's GPU.
    """
    text = (PROFILES / "h200.toml").read_text()
    sms, gbps = limits.ceilings.sms, round(limits.ceilings.memory_tbps * 1000)
    for old, new in (
        ('name = "h200"', f'name = "{path.stem}"'),
        ("sm = 90", f"sm = {code.removeprefix('sm_') if code else SERVER_SM}"),
        ("sm_count = { value = 132,", f"sm_count = {{ value = {sms},"),
        ("bandwidth_gbps = { value = 4800,", f"bandwidth_gbps = {{ value = {gbps},"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text)
    return path


def table(cells: Mapping[str, Cells], tuned: Mapping[str, Cells]) -> list[str]:
    """Return a row for each network and batch: times on the slice, ratios on slice and whole GPU.

    "predicted" is the time of the host's tactics over that of the fastest ones.
    """
    lines = [
        "| network | batch | FP16 us | INT8 us | compiled us | eager us | FP16 to compiled "
        "| INT8 to FP16 | predicted FP16 | predicted INT8 | whole GPU: FP16 to compiled |",
        "|---|" + "--:|" * 10,
    ]
    rows = sorted({(name, batch) for name, batch, _ in tuned["slice"]})
    for name, batch in rows:

        def time_us(subject: str, of: Cells) -> float:
            cell = of.get((name, batch, subject))  # noqa: B023  (called within this round)
            return math.nan if cell is None or cell.error is None else cell.time_us

        tuned_us = {p: time_us(p, tuned["slice"]) for p in PRECISIONS}
        first = {p: time_us(p, cells["slice"]) for p in PRECISIONS}
        compiled, eager = (time_us(peer, cells["slice"]) for peer in ("compiled", "eager"))
        whole = time_us("compiled", cells["whole"]) / time_us("fp16", tuned["whole"])
        figures = (
            *(f"{value:.0f}" for value in (tuned_us["fp16"], tuned_us["int8"], compiled, eager)),
            *(
                f"{value:.2f}"
                for value in (compiled / tuned_us["fp16"], tuned_us["fp16"] / tuned_us["int8"])
            ),
            *(f"{first[p] / tuned_us[p]:.2f}" for p in PRECISIONS),
            f"{whole:.2f}",
        )
        lines.append(f"| {name} | {batch} | " + " | ".join(figures) + " |")
    return [line.replace(" nan ", " ") for line in lines]


def summary(tuned: Mapping[str, Cells]) -> list[str]:
    """Return the geometric mean and the least ratio to torch.compile on slice and whole GPU."""
    lines = []
    for place in PLACES:
        ratios = [
            tuned[place][name, batch, "compiled"].time_us / cell.time_us
            for (name, batch, subject), cell in tuned[place].items()
            if subject == "fp16"
            and cell.error is not None
            and (name, batch, "compiled") in tuned[place]
        ]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            lines.append(
                f"{place}: {mean:.2f} times torch.compile in FP16, least {min(ratios):.2f}, "
                f"{sum(ratio >= 1.5 for ratio in ratios)} of {len(ratios)} at 1.5 or more"
            )
    return lines


def dearest(layers: Sequence[Layer]) -> list[str]:
    """Return a line for each engine: its dearest operations' share of their roofline."""
    engines: dict[tuple[str, int, str], list[Layer]] = {}
    for layer in layers:
        engines.setdefault((layer.network, layer.batch, layer.precision), []).append(layer)
    lines = []
    for (name, batch, precision), rows in engines.items():
        top = sorted(rows, key=lambda row: -row.time_us)[:DEAREST]
        slow = sum(row.floor_us < row.time_us / 2 for row in top)
        share = sum(row.floor_us for row in rows) / sum(row.time_us for row in rows)
        lines.append(
            f"{name} {batch} {precision}: {share:.0%} of the roofline; {slow} of the {len(top)} "
            f"dearest operations below half of theirs"
        )
        lines += [
            f"    {row.time_us:7.1f} us {row.floor_us / row.time_us:4.0%} {row.kernel:16} "
            f"{' '.join(row.nodes)[:90]}"
            for row in top
        ]
    return lines


def close_choices(choices: Iterable[Sequence[str]], times_us: Mapping[str, float]) -> list[bool]:
    """Return, for each operation with several timed tactics, whether the host's was a good one.

    `choices`: the keys of its tactics, the host's first, which may take `CLOSE` times the fastest.
    """
    return [
        times_us[keys[0]] <= CLOSE * min(times_us[key] for key in keys)
        for keys in choices
        if all(key in times_us for key in keys)
    ]


def predictions(engines: Path, timings: Path) -> list[str]:
    """Return a line for each precision of a folder of engines whose tactics were timed."""
    times = {
        key: time_us
        for device in read_timings(timings).devices
        for key, time_us in device.median_us.items()
    }
    lines = []
    for precision in PRECISIONS:
        close: list[bool] = []
        for path in sorted(engines.glob(f"*-{precision}.engine")):
            with open_engine(path) as engine:
                for kernels in kernels_of(engine):
                    close += close_choices(choices_of(engine, kernels), times)
        if close:
            lines.append(
                f"{engines.name} {precision}: the host's tactic is within {CLOSE - 1:.0%} of the "
                f"fastest for {sum(close) / len(close):.0%} of {len(close)} choices"
            )
    return lines


def measure(options: argparse.Namespace) -> None:
    """Measure the rooflines, build what is missing, time the parts; JSON files in the folder."""
    folder: Path = options.folder
    which = ("--networks", *options.networks, "--batches", *options.batches)
    with gpu_slice(options.percent) as sliced:
        environments = {"slice": sliced, "whole": dict(os.environ)}
        for place in options.places:
            prefix = file_prefix(place, options.percent, options.code)
            engines = folder / prefix
            if options.parts != ["peers"]:
                nothing = ("--networks", "--precisions", "--peers")
                run = bench(environments[place], folder / f"{prefix}-limits.json", *nothing)
                build(options, engines, run)
            engine_options = ("--peers", "--engines", engines, "--precisions", *options.precisions)
            cache = ("--timing-cache", folder / f"{prefix}.timings")
            subjects: dict[str, tuple[object, ...]] = {
                "predicted": engine_options,
                "tuned": (*engine_options, "--layers", *cache),
                "peers": ("--precisions",),
            }
            for part in options.parts:
                start = file_prefix(place, options.percent) if part == "peers" else prefix
                bench(environments[place], folder / f"{start}-{part}.json", *which, *subjects[part])


def build(options: argparse.Namespace, engines: Path, limits: Run) -> None:
    """Build the missing engines of a place, whose rooflines are `limits`."""
    from scripts.gpu_builds import build_missing, engine_path  # torchvision: tables need none

    folder: Path = options.folder
    profile = slice_profile(folder / f"{engines.name}-gpu.toml", limits, options.code)
    with ExitStack() as stack:
        if options.code:
            stack.enter_context(compiling_older(folder, options.code, SERVER_SM))
        build_missing(
            engines, options.networks, options.batches, options.precisions, options.jobs,
            profile=str(profile),
        )  # fmt: skip
    every = product(options.networks, options.batches, options.precisions)
    for name, batch, precision in every if options.code else ():
        name_gpu(engine_path(engines, name, batch, precision), SERVER_SM)


def main() -> None:
    """Time what is asked for, and print the tables of all that the folder has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--networks", nargs="*", default=NETWORKS)
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 8))
    parser.add_argument("--percent", type=int, default=12, help="of the SMs; 12 are 14 of 132")
    parser.add_argument("--places", nargs="+", choices=PLACES, default=PLACES)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--code", choices=CODES, help="of kernels, as for an older GPU")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.networks:
        measure(options)
    runs = {
        path.stem: msgspec.json.decode(path.read_bytes(), type=Run)
        for path in sorted(options.folder.glob("*-*.json"))
    }

    def name(place: str, part: str) -> str:
        code = None if part == "peers" else options.code
        return f"{file_prefix(place, options.percent, code)}-{part}"

    cells = {
        kind: {
            place: merged(
                [runs[file] for part in ("peers", kind) if (file := name(place, part)) in runs]
            )
            for place in PLACES
        }
        for kind in PARTS[:2]
    }
    tuned = runs.get(name("slice", "tuned"))
    layers = tuned.layers if tuned else ()
    lines = [*dearest(layers), *table(cells["predicted"], cells["tuned"]), *summary(cells["tuned"])]
    for place in PLACES:
        prefix = file_prefix(place, options.percent, options.code)
        lines += predictions(options.folder / prefix, options.folder / f"{prefix}.timings")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
