"""Measure calibrations on workers that die, and matrices of builds, against plain runs.

    python -m scripts.bench_scale calibrate [--samples 2000] [--workers 4] [--kill 2]
    python -m scripts.bench_scale builds [--models 3] [--profiles orin-nano-8gb orin-nx-16gb]
                                         [--precisions fp16 int8] [--workers 1]
    python -m scripts.bench_scale storm [--clients 100000] [--handshake-ms 1.5]
    python -m scripts.bench_scale farm [--boards 50] [--tactics 220] [--die 5] [--lie 2]

calibrate: a random network over random arrays, by one process and by Dask workers (a process each).
Of these some are killed with SIGKILL in the middle, and one stands still for three quarters of the
time. The cluster runs before the clock does; what workers import for their first task counts.
Prints whether the tables are the same bytes, the clock against the ideal split (processor seconds
of the plain run over what the workers had: cores at most, dead ones not counted), and the processor
seconds of both.

builds: `tandem build` for each engine, then `tandem build-all`, which is killed once half of them
are there and started again, a second run, and whether engines are the same bytes. Each side has a
cache of its own, which is empty at first, and the plain loop has TANDEM_REBUILD set. Processor
seconds are those of all processes, the killed ones among them.

storm: agents whose broker comes back after an outage, simulated with their own pauses. The broker
has one core, and takes what came first first: half of `--handshake-ms` for its answer to a client,
half for the client's answer, and a little for one that has given up. `python -m scripts.bench_fleet
--row reconnect` measures the figure.

farm: simulated boards (scripts/farm_boards.py) time tactics over a real mosquitto, with signed
commands and leases in a real store; some die, some lie by 3. Prints whether every time is the true
one of a board within the error that the table states, and how many messages that took.
"""

import argparse
import ctypes
import heapq
import itertools
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
from onnx import TensorProto, helper

from device.protocol.mqtt import BACKOFF_S, pause_s
from device.protocol.mqtt_connection import CONNECT_TIMEOUT_S
from scripts.farm_boards import PROFILE, FarmBoard, farm_fleet, mosquitto, simulated, works
from toolkit.fleet.farm.run import Run, boards_for
from toolkit.fleet.farm.values import Rules

TANDEM = (sys.executable, "-m", "toolkit.cli")
GONE_S = 50e-6  # to close a connection whose client has gone
ROUND_TRIP_S = 0.05
SIZE, CHANNELS = 32, 24
DASK = "distributed.cli.dask_"
PR_SET_CHILD_SUBREAPER = 36
prctl = ctypes.CDLL(None).prctl


def main(words: Sequence[str] | None = None) -> int:
    """Print the figures as JSON; 1 if results differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    one = commands.add_parser("calibrate")
    one.add_argument("--samples", type=int, default=2000)
    one.add_argument("--workers", type=int, default=4)
    one.add_argument("--kill", type=int, default=2)
    two = commands.add_parser("builds")
    two.add_argument("--models", type=int, default=3)
    two.add_argument("--workers", type=int, default=1)
    two.add_argument("--samples", type=int, default=64)
    two.add_argument("--profiles", nargs="+", default=["orin-nano-8gb", "orin-nx-16gb"])
    two.add_argument("--precisions", nargs="+", default=["fp16", "int8"])
    four = commands.add_parser("storm")
    four.add_argument("--clients", type=int, default=100_000)
    four.add_argument("--handshake-ms", type=float, default=1.5)
    four.add_argument("--outage-s", type=float, default=600.0)
    three = commands.add_parser("farm")
    three.add_argument("--boards", type=int, default=50)
    three.add_argument("--tactics", type=int, default=220)
    three.add_argument("--a-job", type=int, default=5)
    three.add_argument("--die", type=int, default=5)
    three.add_argument("--lie", type=int, default=2)
    three.add_argument("--lease-s", type=float, default=10.0)
    options = parser.parse_args(words)
    if options.what == "storm":
        print(json.dumps(storm(options.clients, options.handshake_ms / 1000, options.outage_s)))
        return 0
    with tempfile.TemporaryDirectory(prefix="tandem-scale-") as name:
        measure = {"calibrate": calibrate, "builds": builds, "farm": farm}[options.what]
        figures = measure(Path(name), options)
    print(json.dumps(figures, indent=1))
    return 0 if figures.get("same_bytes", figures.get("within_error")) else 1


def calibrate(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Measure one calibration by one process, and by workers that die."""
    write_model(folder / "m.onnx", 0)
    write_samples(folder / "data", options.samples)
    words = ["calibrate", "m.onnx", "--data", "data", "--method", "minmax", "--accept-loss"]
    plain = run(folder, *words, "-o", "plain.json")
    with dask(folder, options.workers) as (address, workers):
        hold = threading.Thread(target=stand_still, args=(workers[-1],), daemon=True)
        hold.start()
        ends = [
            threading.Timer(plain[0] / options.workers * (0.4 + 0.3 * number), worker.kill)
            for number, worker in enumerate(workers[: options.kill])
        ]
        for end in ends:
            end.start()
        spread = run(folder, *words, "-o", "spread.json", "--workers", address)
        for end in ends:
            end.join()
        killed = sum(worker.poll() is not None for worker in workers)
        used = sum(map(cpu_of, workers))
    alive = options.workers - options.kill
    ideal = plain[1] / min(alive, len(os.sched_getaffinity(0)))
    return {
        "samples": options.samples,
        "same_bytes": same(folder / "plain.json", folder / "spread.json"),
        "killed": killed,
        "plain_wall_s": round(plain[0], 1),
        "plain_cpu_s": round(plain[1], 1),
        "wall_s": round(spread[0], 1),
        "ideal_s": round(ideal, 1),
        "wall_to_ideal": round(spread[0] / ideal, 2),
        "load": round(os.getloadavg()[0], 1),  # with others' work: the ideal is of an idle machine
        "cpu_s_here": round(spread[1], 1),
        "cpu_s_here_and_of_workers_alive": round(spread[1] + used, 1),
    }


def farm(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Measure a table of tactics by boards that die and lie."""
    rng = random.Random(7)
    truth = {f"t{number:03}": rng.uniform(2.0, 900.0) for number in range(options.tactics)}
    keys = list(truth)
    items = {
        f"part-{start}": {key: truth[key] for key in keys[start : start + options.a_job]}
        for start in range(0, len(keys), options.a_job)
    }
    boards = {f"board-{number:02}": FarmBoard() for number in range(options.boards)}
    for number, board in enumerate(rng.sample(list(boards.values()), options.die + options.lie)):
        if number < options.die:
            board.dies_at = rng.randint(1, 2)
        else:
            board.factor = rng.choice((3.0, 1 / 3))
    (folder / "kit").write_bytes(b"kit")
    with mosquitto(folder) as port:
        fleet = farm_fleet(folder / "fleet", port, list(boards))
        with closing(fleet.open_store()) as database, simulated(port, boards, items):
            chosen = [one.device for one in boards_for(database, f"profile={PROFILE}")]
            rules = Rules(lease_s=options.lease_s)
            run = Run(
                fleet, database, folder / "kit", works(items), minutes=1.0, who="bench",
                rules=rules,
            )  # fmt: skip
            began, cpu = time.monotonic(), time.process_time()
            table = run.measure(chosen)
            wall, cpu = time.monotonic() - began, time.process_time() - cpu
    worst = max(abs(row.time_us / truth[key] - 1.0) for key, row in table.rows.items())
    liars = {name for name, board in boards.items() if board.factor != 1.0}
    return {
        "boards": options.boards,
        "tactics": len(table.rows),
        "within_error": table.rows.keys() == truth.keys()
        and worst <= table.error
        and not any(liars & set(row.boards) for row in table.rows.values()),
        "stated_error": round(table.error, 4),
        "worst_error": round(worst, 4),
        "dead": sorted(table.out),
        "liars": {name: round(factor, 2) for name, factor in sorted(table.liars.items())},
        "jobs": sum(board.taken for board in boards.values()),
        "messages": run.messages,
        "wall_s": round(wall, 1),
        "lease_s": options.lease_s,
        "cpu_s_with_boards": round(cpu, 1),
    }


def builds(folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Measure a matrix of builds."""
    names = [f"m{number}" for number in range(options.models)]
    for number, name in enumerate(names):
        write_model(folder / f"{name}.onnx", number)
    write_samples(folder / "data", options.samples)
    matrix = {
        "profiles": options.profiles,
        "precisions": options.precisions,
        "calibration": ["--method", "minmax", "--accept-loss"],
        "models": [{"path": f"{name}.onnx", "data": "data"} for name in names],
    }
    (folder / "matrix.toml").write_text("".join(f"{k} = {toml(v)}\n" for k, v in matrix.items()))
    cells = list(itertools.product(names, options.precisions, options.profiles))
    engines = [f"{name}.{profile}.{precision}.engine" for name, precision, profile in cells]
    began = children_s()
    with ThreadPoolExecutor(options.workers) as threads:
        list(threads.map(partial(build_one, folder), cells, engines))
    loop = children_s() - began
    words = ["build-all", "matrix.toml", "--workers", str(options.workers)]
    first = killed_in_the_middle(folder, words, max(1, len(engines) // 2))
    all_of_them = run(folder, *words, cache="all")[1]
    second = run(folder, *words, cache="all")[1]
    return {
        "engines": len(engines),
        "same_bytes": all(same(folder / one, folder / "engines" / one) for one in engines),
        "loop_cpu_s": round(loop, 1),
        "build_all_cpu_s": round(first[1] + all_of_them, 1),
        "ratio": round((first[1] + all_of_them) / loop, 3),
        "engines_when_killed": first[0],
        "second_cpu_s": round(second, 2),
        "second_to_first": round(second / (first[1] + all_of_them), 4),
    }


def build_one(folder: Path, cell: tuple[str, str, str], engine: str) -> None:
    """Build the engine of a model in a precision for a profile, by a command of its own."""
    name, precision, profile = cell
    words = ["build", f"{name}.onnx", "--profile", profile, "--precision", precision]
    if precision == "int8":
        words += ["--data", "data", "--method", "minmax", "--accept-loss"]
    run(folder, *words, "-o", engine, cache="loop", rebuild=True)


def storm(clients: int, handshake_s: float, outage_s: float, seed: int = 1) -> dict[str, object]:
    """Return when how many clients are back after an outage, in seconds from its end."""
    chance = random.Random(seed)
    last = len(BACKOFF_S) if outage_s >= sum(BACKOFF_S) else 1
    wait_s = pause_s(last, 0, 1.0)
    # (when, client, timed-out handshakes before, whether it is its second half, when it gives up)
    coming = [(chance.uniform(0.0, wait_s), n, 0, False, 0.0) for n in range(clients)]
    heapq.heapify(coming)
    queue: deque[tuple[float, int, int, bool, float]] = deque()
    now_s = busy_s = wasted_s = 0.0
    back: list[float] = []
    while coming or queue:
        if not queue:
            now_s = max(now_s, coming[0][0])
        while coming and coming[0][0] <= now_s:
            came_s, client, crowded, is_second, until_s = heapq.heappop(coming)
            queue.append(
                (came_s, client, crowded, is_second, until_s or came_s + CONNECT_TIMEOUT_S)
            )
        _came_s, client, crowded, is_second, until_s = queue.popleft()
        if now_s > until_s:
            now_s += GONE_S
            wasted_s += handshake_s / 2 if is_second else GONE_S
            again_s = until_s + pause_s(0, crowded + 1, chance.random())
            heapq.heappush(coming, (max(now_s, again_s), client, crowded + 1, False, 0.0))
            continue
        now_s, busy_s = now_s + handshake_s / 2, busy_s + handshake_s / 2
        if is_second:
            back.append(now_s)
        else:
            heapq.heappush(coming, (now_s + ROUND_TRIP_S, client, crowded, True, until_s))
    return {
        "clients": clients,
        "half_s": round(back[len(back) // 2], 1),
        "all_s": round(back[-1], 1),
        "at_best_s": round(clients * handshake_s, 1),
        "wasted_s": round(wasted_s, 1),
    }


def killed_in_the_middle(folder: Path, words: Sequence[str], count: int) -> tuple[int, float]:
    """Kill a run once it has `count` engines; returns the number of engines, and processor seconds,
    those of its workers among them: as orphans they are this process's to wait for."""
    if prctl(PR_SET_CHILD_SUBREAPER, 1):
        raise SystemExit("this kernel gives orphans to nobody but init")
    began = children_s()
    engines = folder / "all" / "engines"
    with subprocess.Popen(
        [*TANDEM, *words], cwd=folder, env=environment(folder, "all"),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        while process.poll() is None and len(list(engines.glob("*/*"))) < count:
            time.sleep(0.05)
        orphans = children_of(process.pid)
        process.kill()
    for orphan in orphans:  # they end with it
        with suppress(ChildProcessError):
            os.waitpid(orphan, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 0)  # later orphans are not waited for here
    return len(list(engines.glob("*/*"))), children_s() - began


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    children: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            children += map(int, file.read_text().split())
    return [*children, *(below for one in children for below in children_of(one))]


def run(
    folder: Path, *words: str, cache: str = "cache", rebuild: bool = False
) -> tuple[float, float]:
    """Run a command; returns the seconds of the clock, and of processors."""
    wall, cpu = time.monotonic(), children_s()
    env = environment(folder, cache) | ({"TANDEM_REBUILD": "1"} if rebuild else {})
    done = subprocess.run(
        [*TANDEM, *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr}")
    return time.monotonic() - wall, children_s() - cpu


def environment(folder: Path, cache: str) -> dict[str, str]:
    """The environment of a command with a cache of its own."""
    root = str(Path(__file__).parents[1])
    unset = {"TANDEM_REBUILD", "PYTHONDONTWRITEBYTECODE"}  # pip writes bytecode, too
    rest = {key: value for key, value in os.environ.items() if key not in unset}
    return {**rest, "TANDEM_CACHE": str(folder / cache), "PYTHONPATH": root}


def children_s() -> float:
    """Processor seconds of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def cpu_of(process: "subprocess.Popen[bytes]") -> float:
    """Processor seconds of a running process, 0 if it has ended."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def dask(folder: Path, count: int) -> Iterator[tuple[str, list["subprocess.Popen[bytes]"]]]:
    """Yield the address of a scheduler and its workers, processes of one thread each, once they
    are there: a command finds a cluster that runs."""
    import distributed

    words = ["--port", "0", "--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0"]
    command = [sys.executable, "-m", f"{DASK}scheduler", *words]
    workers: list[subprocess.Popen[bytes]] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as scheduler:
        assert scheduler.stderr is not None
        lines = iter(scheduler.stderr.readline, "")
        address = next(match[0] for line in lines if (match := re.search(r"tcp://[\d.:]+", line)))
        drain = threading.Thread(target=lambda: deque(lines, maxlen=0), daemon=True)
        drain.start()
        try:
            worker = [sys.executable, "-m", f"{DASK}worker", address, "--no-nanny"]
            workers += [
                subprocess.Popen(
                    [*worker, "--nthreads", "1", "--no-dashboard"],
                    stderr=subprocess.DEVNULL, env=environment(folder, "cache"),
                )
                for _ in range(count)
            ]  # fmt: skip
            with cast(Any, distributed).Client(address, timeout="60s") as client:
                client.wait_for_workers(count, timeout=120)
            yield address, workers
        finally:
            for process in workers:
                process.kill()
                process.wait()
            scheduler.terminate()
            drain.join()  # before its pipe is closed


def stand_still(process: "subprocess.Popen[bytes]") -> None:
    """Stop a process for three quarters of each 0.4 s until it ends."""
    while process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.1)


def write_model(path: Path, seed: int) -> None:
    """Write three convolutions and a classifier with random weights."""
    rng = np.random.default_rng(seed)
    c, nodes, weights, last = CHANNELS, [], [], "x"
    for number, depth in enumerate((3, c, c)):
        kernel = rng.normal(size=(c, depth, 3, 3)) / np.sqrt(9 * depth)
        weights.append(onnx.numpy_helper.from_array(kernel.astype(np.float32), f"w{number}"))
        nodes.append(helper.make_node("Conv", [last, f"w{number}"], [f"c{number}"], pads=[1] * 4))
        nodes.append(helper.make_node("Relu", [f"c{number}"], [f"r{number}"]))
        last = f"r{number}"
    weights.append(
        onnx.numpy_helper.from_array(rng.normal(size=(c, 10)).astype(np.float32), "head")
    )
    nodes.append(helper.make_node("GlobalAveragePool", [last], ["p"]))
    nodes.append(helper.make_node("Flatten", ["p"], ["f"]))
    nodes.append(helper.make_node("MatMul", ["f", "head"], ["y"]))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, SIZE, SIZE])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 10])
    graph = helper.make_graph(nodes, path.stem, [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)


def write_samples(folder: Path, count: int, block: int = 500) -> None:
    """Write random arrays, `block` to a file."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    for start in range(0, count, block):
        shape = (min(block, count - start), 3, SIZE, SIZE)
        np.save(folder / f"{start:06}.npy", rng.normal(size=shape).astype(np.float32))


def same(first: Path, second: Path) -> bool:
    """Whether two files hold the same bytes."""
    return first.read_bytes() == second.read_bytes()


def toml(value: object) -> str:
    """A value in TOML: texts, lists and tables on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


if __name__ == "__main__":
    sys.exit(main())
