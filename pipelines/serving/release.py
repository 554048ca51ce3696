"""A release of kind "serve", as the agent runs it: its trial, health and figures.

The first inference is the trial's. Later ones prove that the engines still run: one of zeros for
each model that answered no request lately goes through the same queue as those of clients, so that
an engine that hangs is noticed, and the process is started again.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import quantiles

from device.engine.file import open_engine
from device.errors import PipelineError
from device.protocol.messages import ChildMessage, Heartbeat, Ready, Result, Stats
from pipelines.config import PipelineConfig, ServeConfig
from pipelines.runtime.heartbeat import HEARTBEAT_S
from pipelines.serving.bundles import models_in
from pipelines.serving.protocol import Refusal, Status
from pipelines.serving.queued_model import QueuedModel
from pipelines.serving.repository import Repository, Source
from pipelines.serving.server import ServeOptions, check_reach, run, serving

PROBE_S = 1.0  # a model that answered nothing for so long is asked
HANG_S = 30.0  # one that was asked and answers nothing for so long hangs
STATS_S = 1.0


def run_release(
    config: PipelineConfig,
    folder: Path,
    profile: str,
    emit: Callable[[ChildMessage], None],
    stop: threading.Event,
) -> None:
    """Serve the engines of a bundle until `stop` is set. Raises TandemError."""
    models = {
        one.name: Source(one.name, folder, None, {1: one.engine}, one.config)
        for one in models_in(folder, config)
    }
    repository = Repository(lambda: models, "none", profile=profile)
    options = options_of(config.serve or ServeConfig(), folder)
    check_reach(options)
    with open_engine(next(iter(models.values())).versions[1]) as engine:
        sha256 = engine.sha256
    run(_run(options, repository, partial(_tell, config.name, sha256, emit), stop))


def options_of(config: ServeConfig, folder: Path) -> ServeOptions:
    """Return the options of a server for [serve]."""

    def path(text: str) -> Path | None:
        return Path(text) if text else None

    return ServeOptions(
        repository=folder,
        host=config.host,
        http_port=config.http_port or None,
        grpc_port=config.grpc_port or None,
        metrics_port=config.metrics_port or None,
        max_request_mb=config.max_request_mb,
        token_file=path(config.token_file),
        certificate=path(config.certificate),
        key=path(config.key),
        client_ca=path(config.client_ca),
    )


async def _run(
    options: ServeOptions,
    repository: Repository,
    begin: "Callable[[list[QueuedModel], float], _Reporter]",
    stop: threading.Event,
) -> None:
    async with serving(options, repository):
        if repository.reasons:
            raise PipelineError("; ".join(repository.reasons.values()))
        models = [model for model in repository.models if isinstance(model, QueuedModel)]
        began_s = time.monotonic()
        for model in models:
            await model.infer(model.sample())
        reporter = begin(models, time.monotonic() - began_s)
        probes: dict[str, asyncio.Task[object]] = {}
        asked_s: dict[str, float] = {}  # since its last answer
        while not stop.is_set():
            for model in models:
                now_s, task = time.monotonic(), probes.get(model.name)
                if now_s - model.figures.last_s <= PROBE_S:
                    asked_s.pop(model.name, None)
                    continue
                silent_s = now_s - asked_s.setdefault(model.name, now_s)
                if silent_s > HANG_S:
                    raise PipelineError(
                        f"model {model.name!r} has answered no request of zeros for {silent_s:.0f}"
                        f" s; the limit is {HANG_S:.0f} s: its engine hangs, start the process"
                        " again."
                    )
                if task is None or task.done():
                    probes[model.name] = asyncio.create_task(_probe(model))
            reporter.tick()
            await asyncio.sleep(HEARTBEAT_S / 2)


async def _probe(model: QueuedModel) -> None:
    try:
        await model.infer(model.sample())
    except Refusal as refusal:
        if refusal.status is not Status.UNAVAILABLE:  # a full queue proves that it is asked
            raise


def _tell(
    name: str, sha256: str, emit: Callable[[ChildMessage], None],
    models: list[QueuedModel], first_s: float,
) -> "_Reporter":  # fmt: skip
    segments = tuple(
        f"{model.name}: {report.segment} on {report.processor}, {report.implementation}"
        for model in models
        for report in model.reports
    )
    emit(Ready(pipeline=name, engine_sha256=sha256, segments=segments, warm_up_s=first_s))
    emit(Result(seq=0, latency_ms=first_s * 1e3))
    return _Reporter(models, emit)


class _Reporter:
    """Emits heartbeats and figures."""

    def __init__(self, models: list[QueuedModel], emit: Callable[[ChildMessage], None]) -> None:
        self._models = models
        self._emit = emit
        self._since_s = time.monotonic()
        self._beat_s = self._stats_s = 0.0
        self._counted = 0

    def tick(self) -> None:
        """Emit what is due."""
        now_s = time.monotonic()
        frames = sum(model.figures.success for model in self._models)
        errors = sum(model.figures.failures["BACKEND"] for model in self._models)
        if now_s >= self._beat_s + HEARTBEAT_S:
            self._beat_s = now_s
            self._emit(Heartbeat(
                frames=frames, errors=errors, state="running", since_s=self._since_s, taken=frames
            ))  # fmt: skip
        if now_s >= self._stats_s + STATS_S:
            recent = [ms for model in self._models for ms in model.figures.recent_ms]
            cuts = quantiles(recent, n=100) if len(recent) > 1 else [*recent, 0.0] * 99
            spent_s, self._stats_s = now_s - self._stats_s, now_s
            self._emit(Stats(
                frames=frames - self._counted, fps=(frames - self._counted) / spent_s,
                latency_p50_ms=cuts[49], latency_p99_ms=cuts[98],
                stage_p50_ms={}, stage_p99_ms={}, dropped={},
                recent_p50_ms=cuts[49], recent_p95_ms=cuts[94],
            ))  # fmt: skip
            self._counted = frames
