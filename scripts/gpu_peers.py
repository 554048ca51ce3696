"""PyTorch on the networks of `scripts/gpu_networks.py`: compiled in parallel, timed in sequence.

Compilation takes by far the longest, on the CPU only. So each network has a process that compiles
it at every batch and records CUDA graphs. When all are ready, they are timed one after the other,
with nothing else on the GPU.
"""

import copy
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from scripts.gpu_engine import finite_error
from scripts.gpu_networks import floors_us, make_network, picture_size, pictures
from scripts.gpu_table import Ceilings, Cell

PEERS = ("eager", "compiled")
WARM_UP = 30
RUNS = 200


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A network at one batch as a CUDA graph; `input` is what the graph reads."""

    cell: Cell  # without its time
    graph: Any
    input: Any


def time_peers(
    networks: Sequence[str], batches: Sequence[int], peers: Sequence[str], ceilings: Ceilings
) -> Iterator[Cell]:
    """Yield the cells of all networks, batches and peers, with GPU times in microseconds.

    Raises RuntimeError after all others are timed: the process of a network failed.
    """
    context = multiprocessing.get_context("spawn")
    running: list[tuple[str, Connection, multiprocessing.process.BaseProcess]] = []
    for name in networks:
        ours, theirs = context.Pipe()
        arguments = (theirs, name, tuple(batches), tuple(peers), ceilings)
        process = context.Process(target=_work, args=arguments)
        process.start()
        theirs.close()
        running.append((name, ours, process))
    failed = [name for name, pipe, _ in running if not _has_recorded(pipe)]
    for name, pipe, process in running:
        if name not in failed:
            pipe.send(None)
            while (cell := pipe.recv()) is not None:
                yield cell
        process.join()
    if failed:
        raise RuntimeError(f"the processes that run {', '.join(failed)} in PyTorch have ended")


def median_us(run: Callable[[], object], warm_up: int = WARM_UP, runs: int = RUNS) -> float:
    """Return the median GPU time of a function between events, in microseconds."""
    times = []
    for _ in range(warm_up + runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times[warm_up:])


def _has_recorded(pipe: Connection) -> bool:
    """Wait until a process has recorded its graphs; return False if it ended before."""
    try:
        pipe.recv()
    except EOFError:
        return False
    return True


def _work(
    pipe: Connection,
    name: str,
    batches: Sequence[int],
    peers: Sequence[str],
    ceilings: Ceilings,
) -> None:
    """Record all graphs, signal, wait for the start, and time them."""
    import torch._inductor.config as inductor

    inductor.freezing = True
    torch.backends.cudnn.allow_tf32 = False  # what PyTorch's FP16 is compared with is FP32
    network = make_network(name)
    half = copy.deepcopy(network).half().to(memory_format=torch.channels_last)
    forms = {"eager": half, "compiled": torch.compile(half, dynamic=False)}
    recorded = []
    for batch in batches:
        x = torch.from_numpy(pictures(batch, picture_size(name), np.random.default_rng())).cuda()
        with torch.no_grad():
            truth = network(x).cpu().numpy()
        floor = floors_us(network, x, 2, ceilings.fp16_tflops, ceilings.memory_tbps)
        half_input = x.half().to(memory_format=torch.channels_last)
        for peer in peers:
            began = time.monotonic()
            error, graph = _record(forms[peer], half_input, truth)
            taken = time.monotonic() - began
            print(f"{name:16} {batch:4} {peer:9} recorded in {taken:.0f} s", flush=True)
            cell = Cell(name, batch, peer, error, 0.0, floor)
            recorded.append(_Recorded(cell, graph, half_input))
        torch.cuda.empty_cache()
    torch.cuda.synchronize()
    pipe.send(None)
    pipe.recv()
    for recording in recorded:
        time_us = median_us(recording.graph.replay)
        cell = recording.cell
        pipe.send(Cell(cell.network, cell.batch, cell.subject, cell.error, time_us, cell.floor_us))
    pipe.send(None)


def _record(run: Any, x: Any, truth: np.ndarray) -> tuple[float | None, Any]:  # noqa: ANN401
    """Return the error against FP32, and a CUDA graph of one run."""
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            output = run(x)
        stream.synchronize()
        error = finite_error(output.float().cpu().numpy(), truth)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run(x)
    return error, graph
