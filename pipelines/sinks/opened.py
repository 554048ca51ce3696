"""The sinks of a running pipeline, which may change while it runs.

A sink that stays as it is goes on. One that must give a port or a file free is closed first; all
others are closed in a thread, as finishing a video takes long.
"""

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol, runtime_checkable

from device.closing import Closing
from device.errors import PipelineError, TandemError
from device.protocol.messages import Reload, Stats
from pipelines.sink_config import McapSink, SinkConfig, VideoSink, resource_of
from pipelines.sinks.result import Sink, SinkContext, StatsSink
from pipelines.sinks.table import open_sink

CLOSE_S = 10.0  # a closing sink is waited for so long at the end

_log = logging.getLogger(__name__)


@runtime_checkable
class AdjustableSink(Protocol):
    """A sink that can take another configuration without being opened again."""

    def adjust(self, config: SinkConfig) -> bool:
        """Go on with this configuration; False if it must be opened for it."""


@runtime_checkable
class TickedSink(Protocol):
    """A sink that has something to do without frames."""

    def tick(self) -> None:
        """Do it; the loop calls this, also while it waits for a frame."""


@runtime_checkable
class ReloadSink(Protocol):
    """A sink that tells of changes to pipeline.toml."""

    def take_reload(self, reload: Reload) -> None:
        """Tell of a change, or of one that was refused."""


class OpenSinks(Closing):
    """All sinks of a pipeline; used by its loop, `take_stats` and `dropped` by any thread."""

    def __init__(self, configs: Sequence[SinkConfig], context: SinkContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._use(())
        self._entered: list[Sink] = []  # and not yet closed
        self._closed: Counter[str] = Counter()
        self._closers: list[threading.Thread] = []
        try:
            for config in configs:
                self._use((*self._open, (config, self._enter(config))))
        except BaseException:
            self.close()
            raise

    def _use(self, pairs: Iterable[tuple[SinkConfig, Sink]]) -> None:
        """Let these be the sinks from now on; the loop asks for them several times a frame."""
        self._open = tuple(pairs)
        self.sinks = tuple(sink for _, sink in self._open)  # that are open now
        # To ask a protocol takes as long as to tick.
        self._ticked = tuple(sink for sink in self.sinks if isinstance(sink, TickedSink))

    @property
    def dropped(self) -> Mapping[str, int]:
        """What all sinks dropped so far by cause, those that are closed too."""
        with self._lock:
            total = Counter(self._closed)
            for sink in self._entered:
                total.update(sink.dropped)
        return dict(total)

    def close(self) -> None:
        """Close all sinks, the last one first, and wait for those that are closing; also where one
        of them raises."""
        pairs = self._open
        self._use(())
        with ExitStack() as stack:
            for closer in self._closers:
                stack.callback(closer.join, CLOSE_S)
            for _, sink in pairs:
                stack.callback(self._finish, sink)

    def tick(self) -> None:
        """Let sinks do what is due without a frame."""
        for sink in self._ticked:
            sink.tick()

    def take_stats(self, stats: Stats) -> None:
        """Give the figures of the last second to the sinks that take them."""
        for sink in self.sinks:
            if isinstance(sink, StatsSink):
                sink.take_stats(stats)

    def take_reload(self, reload: Reload) -> None:
        """Let sinks tell of a change to pipeline.toml."""
        for sink in self.sinks:
            if isinstance(sink, ReloadSink):
                sink.take_reload(reload)

    def change(self, configs: Sequence[SinkConfig]) -> None:
        """Go on with these sinks. Raises TandemError: one of them cannot be opened; then those of
        before go on."""
        leaving = list(self._open)
        staying: dict[int, tuple[SinkConfig, Sink]] = {}
        for number, config in enumerate(configs):
            pair = next((one for one in leaving if one[0] == config), None)
            if pair is not None:
                leaving.remove(pair)
                staying[number] = pair
        adjusted: list[tuple[SinkConfig, AdjustableSink]] = []  # with their configurations before
        for number, config in enumerate(configs):
            if number not in staying and (pair := _adjusted(leaving, config)):
                before, sink = pair
                leaving.remove(pair)
                staying[number] = (config, sink)
                if isinstance(sink, AdjustableSink):
                    adjusted.append((before, sink))
        fresh = {n: config for n, config in enumerate(configs) if n not in staying}
        try:
            opened = self._exchange(leaving, fresh)
        except TandemError:
            for earlier, adjustable in adjusted:
                adjustable.adjust(earlier)
            raise
        self._use((staying | opened)[number] for number in range(len(configs)))

    def _exchange(
        self, leaving: Sequence[tuple[SinkConfig, Sink]], fresh: Mapping[int, SinkConfig]
    ) -> dict[int, tuple[SinkConfig, Sink]]:
        """Close sinks and open others in their place; all or nothing."""
        needed = {resource_of(config) for config in fresh.values()} - {None}
        first = [pair for pair in leaving if resource_of(pair[0]) in needed]
        for config, _ in first:
            if isinstance(config, VideoSink | McapSink):
                raise PipelineError(
                    f"the file {config.path} is written already: give the changed sink another"
                    " path."
                )
        for _, sink in first:
            self._finish(sink)
        opened: dict[int, tuple[SinkConfig, Sink]] = {}
        try:
            for number, config in fresh.items():
                opened[number] = (config, self._enter(config))
        except TandemError:
            for _, sink in opened.values():
                self._finish(sink)
            self._use(self._open_again(first))
            raise
        later = [sink for config, sink in leaving if (config, sink) not in first]
        closers = [threading.Thread(target=self._finish, args=(sink,)) for sink in later]
        for closer in closers:
            closer.start()
        self._closers = [*(one for one in self._closers if one.is_alive()), *closers]
        return opened

    def _open_again(
        self, closed: Sequence[tuple[SinkConfig, Sink]]
    ) -> Iterator[tuple[SinkConfig, Sink]]:
        """Yield the sinks of before, those opened again that were closed."""
        for pair in self._open:
            if pair not in closed:
                yield pair
                continue
            try:
                yield pair[0], self._enter(pair[0])
            except TandemError as error:
                _log.error("a sink of before is gone: %s", error)

    def _enter(self, config: SinkConfig) -> Sink:
        sink = open_sink(config, self._context)
        sink.__enter__()
        with self._lock:
            self._entered.append(sink)
        return sink

    def _finish(self, sink: Sink) -> None:
        try:
            sink.__exit__(None, None, None)
        finally:
            with self._lock:
                self._entered.remove(sink)
                self._closed.update(sink.dropped)


def _adjusted(
    leaving: Sequence[tuple[SinkConfig, Sink]], config: SinkConfig
) -> tuple[SinkConfig, Sink] | None:
    """Return the sink that goes on with this configuration, or None."""
    for pair in leaving:
        if type(pair[0]) is type(config) and isinstance(pair[1], AdjustableSink):
            return pair if pair[1].adjust(config) else None
    return None
