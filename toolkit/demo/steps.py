"""The steps of the demo, and the checks that decide whether it passed."""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from msgspec import structs

import configs
from device.engine.file import open_engine
from device.errors import ConfigError, DeployError
from device.protocol.messages import Stats
from device.runtime.session import Session, open_session
from pipelines.config import ModelConfig, PipelineConfig, SourceConfig, load_labels, load_model
from pipelines.runtime.batch import Model
from pipelines.runtime.pipeline import RunOptions, run_pipeline
from pipelines.sink_config import VideoSink
from pipelines.sinks.files import OutputFiles
from pipelines.sinks.table import FrameResult
from pipelines.sources.live import Waiting
from pipelines.sources.table import open_source
from pipelines.stages.accuracy import Accuracy
from toolkit.demo.fleet import DEVICE, Fleet, ReceivedFrame, start_fleet
from toolkit.demo.releases import Release, broken, pipeline_for, write_release
from toolkit.demo.scene_video import FPS, write_scene_video
from toolkit.engine.build import BuildOptions, BuildResult, build_engine
from toolkit.fleet.transports.deploy import DeployOptions, deploy_bundle
from toolkit.fleet.transports.device_deployment import DeployResult
from toolkit.progress import Progress
from toolkit.quantize.ranges.measure import RangeOptions
from toolkit.quantize.trials.score import load_held_out, plain_model, score
from toolkit.shipped import demo_file

SHIPPED_MODEL = configs.ROOT / "models" / "robot-objects.toml"
FRAMES_PER_RELEASE = 90
FRAMES_TIMEOUT_S = 45.0
DEPLOY_TIMEOUT_S = 60.0
VIDEO_FRAMES = 240
MAX_MAP_LOSS = 0.02  # of INT8 against FP32

# Steps and their share of the total time, for the progress bar.
STEPS: tuple[tuple[str, float], ...] = (
    ("draw the scene", 0.09),
    ("build the engine", 0.25),
    ("score", 0.05),
    ("start broker and agent", 0.07),
    ("deploy release 1", 0.14),
    ("deploy release 2", 0.14),
    ("deploy a broken release", 0.17),
    ("annotate the video", 0.09),
)
BUILD_STEPS = {"calibrate": (0.0, 0.3), "compile": (0.3, 0.7)}
"""Steps of a build that take time: what is done before them, and their share."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of the demo. `source` None: a rendered moving scene."""

    out: Path
    profile: str = "agx-orin-64gb"
    source: str | None = None
    model: Path | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """mAP50 in INT8 and FP32 over `pictures` images; `labels` name the classes."""

    int8: Accuracy
    fp32: Accuracy
    pictures: int
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """One condition for the demo to pass."""

    name: str
    passed: bool
    finding: str


@dataclass(frozen=True, slots=True)
class Deployment:
    """One release, its result, and the frames that arrived after it."""

    release: Release
    result: DeployResult
    frames: tuple[ReceivedFrame, ...]


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The results of all steps."""

    options: DemoOptions
    build: BuildResult
    scores: Scores
    deployments: tuple[Deployment, ...]
    stats: Stats | None
    checks: tuple[Check, ...]
    segments: tuple[str, ...]
    video: Path
    report: Path
    duration_s: float

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)


def run_demo(options: DemoOptions, report: Progress) -> DemoResult:
    """Run the demo; raises TandemError where it cannot continue."""
    started_s = time.monotonic()
    options = replace(options, out=options.out.resolve())
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise ConfigError(
            f"{options.out} cannot be created ({err.strerror}); choose another folder with --out."
        ) from err
    if not os.access(options.out, os.W_OK):
        raise ConfigError(f"{options.out} is not writable; choose another folder with --out.")
    subject = _subject(options.model)
    report("draw the scene", 0.0)
    source = _source(options)
    int8 = _build(subject, options, "robot.engine", "entropy", report)
    scores = _score(subject, int8.path, report)
    first = pipeline_for(subject.model, f"{subject.model.name}-1", source)
    report("start broker and agent", 0.0)
    with start_fleet(options.out, options.profile) as fleet:
        deployments = _deploy_all(
            subject, first, int8.path, options=options, fleet=fleet, report=report
        )
        stats = fleet.listener.stats[-1] if fleet.listener.stats else None
        agent_alive = fleet.agent.poll() is None
    video = options.out / "annotated.mp4"
    segments = _annotate(first, int8.path, subject.labels, video, report)
    return DemoResult(
        options=options,
        build=int8,
        scores=scores,
        deployments=deployments,
        stats=stats,
        checks=_checks(scores, deployments, agent_alive),
        segments=segments,
        video=video,
        report=options.out / "report.html",
        duration_s=time.monotonic() - started_s,
    )


@dataclass(frozen=True, slots=True)
class _Subject:
    """The model that the demo deploys, its folder and its labels."""

    model: ModelConfig
    folder: Path
    labels: tuple[str, ...]


def _subject(path: Path | None) -> _Subject:
    """Read the model file beside the ONNX file, or the shipped one."""
    if path is None:
        demo_file("models/robot-objects.onnx")  # refused here where it is not installed
    config = SHIPPED_MODEL if path is None else path.with_suffix(".toml")
    if not config.exists():
        raise ConfigError(
            f"{path} has no {config.name} beside it, which says how to feed and read the model; "
            f"write one like {SHIPPED_MODEL}."
        )
    model = load_model(config)
    if path is not None:
        model = structs.replace(model, file=path.name)
    folder = config.resolve().parent
    return _Subject(model, folder, load_labels(folder / model.labels))


def _source(options: DemoOptions) -> SourceConfig:
    if options.source is not None:
        source = SourceConfig(uri=options.source, loop="://" not in options.source)
        open_source(
            source, Waiting(threading.Event())
        )  # one that is not there is refused before the build
        return source
    return SourceConfig(uri=str(write_scene_video(options.out / "scene.mp4")), loop=True)


def _build(
    subject: _Subject, options: DemoOptions, name: str, method: str, report: Progress
) -> BuildResult:
    model = subject.model

    def report_build(step: str, share: float) -> None:
        if step in BUILD_STEPS:
            before, whole = BUILD_STEPS[step]
            report("build the engine", before + whole * share)

    return build_engine(
        subject.folder / model.file,
        options.profile,
        options.out / name,
        BuildOptions(
            data=subject.folder / model.calibration,
            ranges=RangeOptions(method, preprocess=model.preprocess),
            fallback=False,  # no board will refuse a DLA segment; its kernels double the time
        ),
        report_build,
    )


def _score(subject: _Subject, engine: Path, report: Progress) -> Scores:
    held_out = load_held_out(subject.labels)
    fp32 = score(
        plain_model(subject.folder / subject.model.file),
        subject.model,
        held_out,
        lambda share: report("score", share / 2),
    )
    with open_session(engine) as session:
        name = session.inputs[0].name
        int8 = score(
            lambda blob: session.infer({name: blob}),
            subject.model,
            held_out,
            lambda share: report("score", 0.5 + share / 2),
        )
    return Scores(int8, fp32, len(held_out.pictures), subject.labels)


def _deploy_all(
    subject: _Subject,
    first: PipelineConfig,
    engine: Path,
    *,
    options: DemoOptions,
    fleet: Fleet,
    report: Progress,
) -> tuple[Deployment, ...]:
    """Deploy a first release, a recalibrated one, and one that does not fit its engine."""
    name = subject.model.name
    second = structs.replace(first, name=f"{name}-2")
    third = broken(structs.replace(first, name=f"{name}-3"))
    recalibrated = _build(
        subject, options, "robot-minmax.engine", "minmax", lambda step, share: None
    )
    releases = (
        ("deploy release 1", first, "1.0.0", engine, first.name),
        ("deploy release 2", second, "2.0.0", recalibrated.path, second.name),
        # After the broken one the board must run the second release again.
        ("deploy a broken release", third, "3.0.0", engine, second.name),
    )
    deployments = []
    for step, pipeline, version, file, frames_of in releases:
        report(step, 0.0)
        release = write_release(
            options.out / "releases",
            pipeline,
            engine=file,
            labels=subject.folder / subject.model.labels,
            version=version,
            profile=options.profile,
        )
        result = deploy_bundle(
            release.bundle, (DEVICE,), fleet.broker, DeployOptions(DEPLOY_TIMEOUT_S)
        )[0]
        if not result.live and pipeline is not third:
            raise DeployError(f"{pipeline.name} did not go live on the demo board: {result.reason}")
        frames = fleet.wait_for_frames(
            frames_of, FRAMES_PER_RELEASE, FRAMES_TIMEOUT_S, partial(report, step)
        )
        deployments.append(Deployment(release, result, tuple(frames)))
    return tuple(deployments)


def _annotate(
    config: PipelineConfig, engine: Path, labels: tuple[str, ...], video: Path, report: Progress
) -> tuple[str, ...]:
    """Write an annotated video; return how each segment of the engine ran."""
    (camera,) = config.cameras
    config = structs.replace(
        config,
        source=structs.replace(camera, frames="every", realtime=False, loop=False),
        sinks=(VideoSink(path=str(video), fps=FPS),),
    )
    done = 0

    def count(_: FrameResult) -> None:
        nonlocal done
        done += 1
        report("annotate the video", min(1.0, done / VIDEO_FRAMES))

    with open_engine(engine) as opened, Session(opened) as session:
        run_pipeline(
            config,
            Model(session, labels, opened.sha256),
            RunOptions(
                files=OutputFiles(overwrite=True),  # of an earlier demo in this folder
                frames=VIDEO_FRAMES,
            ),
            watch=count,
        )
        return tuple(f"{r.segment} ({r.processor}): {r.reason}" for r in session.reports)


def _checks(
    scores: Scores, deployments: Sequence[Deployment], agent_alive: bool
) -> tuple[Check, ...]:
    first, second, third = deployments
    loss = scores.fp32.map50 - scores.int8.map50
    objects = sum(len(seen.event.detections) for seen in first.frames)
    return (
        Check(
            "the first release went live",
            first.result.live and objects > 0,
            f"{first.result.phase}; {objects} objects in {len(first.frames)} frames received",
        ),
        Check(
            f"INT8 costs at most {MAX_MAP_LOSS} mAP50",
            loss <= MAX_MAP_LOSS,
            f"{scores.fp32.map50:.3f} in FP32, {scores.int8.map50:.3f} in INT8",
        ),
        Check(
            "the second release went live without a restart of the agent",
            second.result.live and agent_alive,
            f"{second.result.phase}; the agent {'still runs' if agent_alive else 'ended'}",
        ),
        Check(
            "the broken release was rolled back, and the second runs again",
            third.result.phase == "rolled_back" and bool(third.frames),
            f"{third.result.phase}: {third.result.reason}",
        ),
    )
