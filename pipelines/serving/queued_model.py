"""A model whose requests wait in a queue for its instances, and run in batches."""

import asyncio
import logging
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from device.errors import SessionError, TandemError
from device.runtime.cuda.device_array import DeviceArray
from device.runtime.executors.table import SegmentReport
from device.runtime.session import Session
from pipelines.serving.instances import ModelInstances, Runner, usual_size
from pipelines.serving.model import Model
from pipelines.serving.model_config import (
    Config,
    ModelPort,
    batch_of,
    in_range,
)
from pipelines.serving.on_gpu import ALIGNMENT, infer_on_gpu, takes_device_arrays
from pipelines.serving.onnx_file import OnnxFile, texts_of
from pipelines.serving.protocol import (
    BYTES,
    DATATYPES,
    Array,
    InferRequest,
    Refusal,
    Status,
    Tensor,
    from_bf16,
    refuse,
    whole,
)
from pipelines.serving.scheduler import Item, Policy, QueuePolicy, Scheduler

SHORT_NS = 500_000  # an inference that takes less CPU time may keep the event loop waiting
LONG_RATIO = 4  # to SHORT_NS: what takes this at sizes that were short costs by its values

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Work:
    """A request in the queue, as arrays that the model takes. `targets`: where outputs may go on
    the GPU, where the feeds are, too; None: the feeds are on the host."""

    feeds: dict[str, Any]
    answer: asyncio.Future[dict[str, Any]]
    targets: Mapping[str, DeviceArray] | None = None


class QueuedModel(Model):
    """A model with instances in threads, and a queue."""

    def __init__(
        self, version: int, config: Config, opened: ModelInstances, folder: Path, max_queue: int
    ) -> None:
        """Takes the instances, which are ready. Raises ConfigError."""
        super().__init__(version, config, opened.inputs, opened.outputs, folder)
        self._batch = batch_of(opened.inputs, opened.outputs, declared=True)
        self._runners = opened.runners
        self._loop: asyncio.AbstractEventLoop | None = None
        policy = policy_of(config, max_queue)
        self.scheduler = Scheduler(
            policy, [partial(self._run, runner) for runner in opened.runners], self._post
        )
        # Code of the CPU alone may run in the thread of the event loop, as long as its time depends
        # on the sizes of inputs alone: it does not hang.
        self._on_gpu = all(map(takes_device_arrays, opened.runners))
        self._on_cpu = isinstance(opened.runners[0], OnnxFile) or {"portable"} == {
            report.implementation for report in self.reports
        }
        self._usual_ns = SHORT_NS
        self._short: Mapping[str, int] = {}  # the sizes of inputs that ran in a short time

    def close(self) -> None:
        """Answer what waits, then close the instances."""
        if not self.scheduler.close():
            return  # an instance that hangs is not to be closed below its thread
        for runner in self._runners:
            runner.close()

    @property
    def reports(self) -> list[SegmentReport]:
        """How the segments of an engine run; none of a model.onnx."""
        return [one for runner in self._runners[:1] for one in getattr(runner, "reports", ())]

    def sample(self) -> InferRequest:
        """Return a request of zeros."""
        inputs = []
        for port in self.inputs.values():
            sizes = [usual_size(dim) for dim in port.dims]
            shape = [1, *sizes] if self.max_batch else sizes
            array = np.zeros(shape, DATATYPES[port.datatype].numpy)
            inputs.append(Tensor(port.name, port.datatype, array.shape, array))
        return InferRequest(self.name, str(self.version), inputs)

    def warm_up(self, tensors: Sequence[Tensor], count: int) -> None:
        """Run each instance `count` times on inputs; for the time before there are requests.

        Raises Refusal: they do not fit. Raises SessionError: the model fails.
        """
        request = InferRequest(self.name, str(self.version), tensors)
        self._check(request)
        feeds = {tensor.name: self._feed(tensor, tensor.data) for tensor in tensors}
        stacked = self._stack([feeds], self.rows(request))
        for runner in self._runners:
            for _ in range(count):
                runner.infer(stacked)

    async def run(self, request: InferRequest) -> Mapping[str, Array | DeviceArray]:
        """Queue a request and wait for its outputs."""
        if not self._stays_on_gpu(request):
            return await self.run_on_host(request, {})
        feeds = {tensor.name: tensor.device for tensor in request.inputs}
        classified = {
            output.name for output in request.outputs if "classification" in output.parameters
        }
        targets = {
            name: array
            for name, array in request.targets.items()
            if name not in classified and _is_plain(self.outputs[name])
        }
        work = _Work(feeds, asyncio.get_running_loop().create_future(), targets)
        return await self._queued(request, work, work.answer)  # the key of no other

    async def run_on_host(
        self, request: InferRequest, hidden: Mapping[str, Array]
    ) -> dict[str, Array]:
        """As `run`, with arrays of the host; `hidden` inputs are not the client's."""
        feeds = {
            one.name: self._feed(one, one.data if one.device is None else await one.on_host())
            for one in request.inputs
        }
        feeds.update(hidden)
        key = tuple([(name, feeds[name].shape[1:]) for name in sorted(feeds)])
        work = _Work(feeds, asyncio.get_running_loop().create_future())
        return await self._queued(request, work, key)

    def _stays_on_gpu(self, request: InferRequest) -> bool:
        """True if the engine can take all inputs where they are on the GPU."""
        batch = self._batch if self.max_batch else None
        return (
            self._on_gpu
            and bool(request.inputs)
            and all(
                one.device is not None
                and one.device.address % ALIGNMENT == 0
                and _is_plain(self.inputs[one.name])
                for one in request.inputs
            )
            and (batch is None or in_range(self.rows(request), batch))
        )

    async def _queued(self, request: InferRequest, work: _Work, key: Hashable) -> dict[str, Any]:
        self._loop = asyncio.get_running_loop()
        item = Item(work, self.rows(request), key)
        if request.parameters:
            where = f"the request to model {self.name!r}"
            item.level = whole(request.parameters, "priority", where)
            item.timeout_s = whole(request.parameters, "timeout", where) / 1e6
        if self._on_cpu and self._usual_ns < SHORT_NS and self._ran_short(work.feeds):
            if results := self.scheduler.run_here(item):
                if isinstance(results[0], Refusal):
                    raise results[0]
                outputs: dict[str, Any] = results[0]
                return outputs
        else:
            self.scheduler.submit(item)
        timer = None
        if item.timeout_s:
            timer = self._loop.call_later(item.timeout_s, self.scheduler.expire)
        try:
            return await work.answer
        except asyncio.CancelledError:
            item.cancelled = True
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _ran_short(self, feeds: Mapping[str, Array]) -> bool:
        """True if no input is larger than those of a run that took a short time."""
        short = self._short
        if feeds.keys() != short.keys():
            return False
        for name, array in feeds.items():  # noqa: SIM110  (`all` costs twice as much)
            if _size(array) > short[name]:
                return False
        return True

    def _feed(self, tensor: Tensor, array: Array) -> Array:
        port = self.inputs[tensor.name]
        if port.converted:
            array = from_bf16(array)
        if port.datatype == BYTES:
            array = texts_of(tensor.name, array)
        if port.inner is not None:
            batch = array.shape[:1] if self.max_batch else ()
            try:
                array = array.reshape(*batch, *port.inner)
            except ValueError as error:
                refuse(
                    f"inference input {tensor.name!r} of model {self.name!r}: the shape"
                    f" {list(tensor.shape)} does not become {list(port.inner)} (reshape): {error}"
                )
        return array

    def _run(self, runner: Runner, items: list[Item]) -> Sequence[dict[str, Any] | Refusal]:
        """Run a batch on an instance."""
        begin_ns, cpu_begin_ns = time.perf_counter_ns(), time.thread_time_ns()
        waited_ns = sum([int((time.monotonic() - item.queued_s) * 1e9) for item in items])
        rows = [item.rows for item in items]
        results: list[dict[str, Any] | Refusal]
        try:
            feeds = self._stack([item.work.feeds for item in items], sum(rows))
            fed_ns = time.perf_counter_ns()
            targets = items[0].work.targets
            if targets is not None and isinstance(runner, Session):
                results = [infer_on_gpu(runner, items[0].work.feeds, targets)]
                ran_ns = time.perf_counter_ns()
            else:
                outputs = runner.infer(feeds)
                ran_ns = time.perf_counter_ns()
                fed = next((len(feed) for feed in feeds.values()), None) if self.max_batch else None
                results = list(self._split(outputs, rows, fed))
            end_ns = time.perf_counter_ns()
            if targets is None:
                self._judge(feeds, time.thread_time_ns() - cpu_begin_ns)
            self.figures.record_execution(
                rows, waited_ns, (fed_ns - begin_ns, ran_ns - fed_ns, end_ns - ran_ns)
            )
        except Exception as error:  # noqa: BLE001  (a client waits for an answer)
            if not isinstance(error, TandemError):
                _log.exception("model %r failed", self.name)
            refusal = Refusal(Status.INTERNAL, f"model {self.name!r} failed: {error}")
            refusal = error if isinstance(error, Refusal) else refusal
            results = [refusal for _ in items]
        return results

    def _judge(self, feeds: Mapping[str, Array], cpu_ns: int) -> None:
        """Learn from the CPU time of a run what may run in the thread of the event loop."""
        self._usual_ns = max(cpu_ns, self._usual_ns * 9 // 10)
        if cpu_ns >= SHORT_NS:
            if cpu_ns >= LONG_RATIO * SHORT_NS and self._ran_short(feeds):
                self._on_cpu = False
            self._short = {}
        elif not self._ran_short(feeds):
            self._short = {name: _size(array) for name, array in feeds.items()}

    def _post(self, items: Sequence[Item], results: Sequence[dict[str, Any] | Refusal]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(_deliver, items, results)

    def _stack(self, feeds: Sequence[dict[str, Array]], rows: int) -> dict[str, Array]:
        """Return the feeds one below another, filled up to a batch that the engine takes."""
        batch = self._batch if self.max_batch else None
        missing = 0
        if batch is not None and not in_range(rows, batch):
            missing = max(batch.min, -(-rows // batch.step) * batch.step) - rows
        if len(feeds) == 1 and not missing:
            return feeds[0]
        stacked = {}
        for name, first in feeds[0].items():
            parts = [feed[name] for feed in feeds]
            if missing:
                parts.append(np.zeros((missing, *first.shape[1:]), first.dtype))
            stacked[name] = np.concatenate(parts)
        return stacked

    def _split(
        self, outputs: Mapping[str, Array], rows: Sequence[int], fed: int | None
    ) -> Sequence[dict[str, Array]]:
        if not self.max_batch:
            return [dict(outputs)]
        for name, array in outputs.items():
            if fed is not None and array.shape[:1] != (fed,):
                raise SessionError(
                    f"output {name!r} has the shape {list(array.shape)} for a batch of {fed}: its"
                    " first dimension is no batch; set max_batch_size to 0."
                )
        ends = np.cumsum(rows)
        return [
            {name: array[end - count : end] for name, array in outputs.items()}
            for end, count in zip(ends, rows, strict=True)
        ]


def _is_plain(port: ModelPort) -> bool:
    """True if a port has the arrays of the engine as they are."""
    return port.datatype != BYTES and port.inner is None and not port.converted


def _size(array: Array) -> int:
    """Return the number of elements, of texts that of their characters too."""
    return array.size + (sum(map(len, array.flat)) if array.dtype.hasobject else 0)


def _deliver(items: Sequence[Item], results: Sequence[dict[str, Any] | Refusal]) -> None:
    for item, result in zip(items, results, strict=True):
        answer = item.work.answer
        if answer.done():  # its client has gone
            continue
        if isinstance(result, Refusal):
            answer.set_exception(result)
        else:
            answer.set_result(result)


def policy_of(config: Config, max_queue: int) -> Policy:
    """Return how a configuration wants requests queued and batched."""
    if config.HasField("sequence_batching"):
        row = getattr(
            config.sequence_batching, config.sequence_batching.WhichOneof("choice") or "direct"
        )
        return Policy(
            model=config.name,
            max_batch=max(1, config.max_batch_size),
            preferred=tuple(getattr(row, "preferred_batch_size", ())),
            delay_s=row.max_queue_delay_microseconds / 1e6,
            max_queue=max_queue,
        )
    if not config.HasField("dynamic_batching"):
        return Policy(config.name, max_queue=max_queue)
    rows = config.dynamic_batching
    return Policy(
        model=config.name,
        max_batch=max(1, config.max_batch_size),
        preferred=tuple(rows.preferred_batch_size),
        delay_s=rows.max_queue_delay_microseconds / 1e6,
        levels=rows.priority_levels,
        default_level=rows.default_priority_level,
        queue=_queue_policy(rows.default_queue_policy),
        by_level={
            level: _queue_policy(rows.priority_queue_policy[level])
            for level in rows.priority_queue_policy
        },
        max_queue=max_queue,
    )


def _queue_policy(row: Any) -> QueuePolicy:  # noqa: ANN401
    return QueuePolicy(
        size=row.max_queue_size,
        timeout_s=row.default_timeout_microseconds / 1e6,
        delays=row.timeout_action == 1,
        own_timeout=row.allow_timeout_override,
    )
