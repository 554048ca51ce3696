"""`tandem-pipeline`: one pipeline as a process of its own, as the agent starts it.

Standard output carries `device.protocol.messages` lines and nothing else; everything else goes to
standard error. A login for the broker is read from TANDEM_MQTT_USERNAME and TANDEM_MQTT_PASSWORD,
and the addresses of sources, which may hold passwords, from TANDEM_SOURCE, or as JSON by their ids
from TANDEM_SOURCES: other users of the machine can read a command line, but not the environment of
a process.
"""

from device.start.isolation import drop_working_directory
from device.start.packages import claim

drop_working_directory()
claim()

# ruff: noqa: E402
import argparse
import hashlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from device.argument_names import ArgumentName, naming_arguments
from device.engine.file import Engine
from device.errors import PipelineError, TandemError
from device.protocol.messages import ChildMessage, Failure
from device.protocol.tls import TlsFiles
from device.runtime.session import Session
from device.update.admission import NO_SERVICES
from device.update.bundle import PIPELINE
from pipelines.config import PipelineConfig, load_pipeline
from pipelines.gstreamer import shell_variables
from pipelines.message_channel import claim_stdout, loading
from pipelines.runtime.switching import SWITCH_INTERVAL_S
from pipelines.sinks.files import check_release
from pipelines.sources.uri import redact, scheme_of

if TYPE_CHECKING:
    from pipelines.open_models import ModelFiles
    from pipelines.runtime.lanes import Model
    from pipelines.shadow.tap import Tap
    from pipelines.sinks.files import OutputFiles
    from pipelines.sinks.table import Broker


# Of messages that are written for `tandem run`.
ARGUMENTS = (
    ArgumentName("`tandem run --overwrite`", "`--overwrite`"),
    ArgumentName(r", or use `tandem run [^`]*`", ""),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a pipeline until it ends or SIGTERM comes; return the exit status."""
    options = make_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    stop = threading.Event()

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop)
    emit = claim_stdout(stop.set)
    try:
        with naming_arguments(ARGUMENTS), loading(emit) as emit_and_begin:
            _run(options, emit_and_begin, stop)
    except TandemError as error:
        emit(Failure(message=str(error)))
        return 1
    return 0


def _run(
    options: argparse.Namespace, emit: Callable[[ChildMessage], None], stop: threading.Event
) -> None:
    folder: Path = options.bundle
    adapt = _sources_here(options.source)
    config = load_pipeline(folder / PIPELINE)
    _check_reach(config, is_release=options.data is not None)
    if config.kind == "serve":
        from pipelines.serving.release import run_release

        run_release(config, folder, options.profile, emit, stop)
        return
    if config.kind == "service":
        from pipelines.service import run_service

        if options.services == "false":
            raise PipelineError(NO_SERVICES.format(name=config.name))
        run_service(config, folder, emit, stop)
        return
    # Here, so that a missing OpenCV is a Failure message too.
    from pipelines.open_models import bundle_files, open_models
    from pipelines.runtime.pipeline import RunOptions, run_pipeline
    from pipelines.runtime.reload import ReloadFile, hangups

    config = adapt(config)
    with ExitStack() as stack:
        files = bundle_files(config, folder)
        models = open_models(config, files, stack, partial(_open_session, options.profile))
        tap = (
            None
            if options.tap is None
            else stack.enter_context(_open_tap(options.tap, config, models))
        )
        reload = None
        if options.data is None:  # a release never changes: its files are those of its hash
            reload = ReloadFile(folder / PIPELINE, adapt)
            stack.enter_context(hangups(reload.now, stop))
        run_pipeline(
            config,
            models[config.first.name],
            RunOptions(
                emit=emit,
                stop=stop,
                broker=_broker(options),
                files=_output_files(options, config, models, files),
                patient=options.wait_for_source,
                frames=options.frames,
                others=models,
                reload=reload,
                tap=tap,
            ),
        )


def _broker(options: argparse.Namespace) -> "Broker | None":
    """Return where sinks of MQTT publish, with the login that the agent gives; None: nowhere."""
    from pipelines.sinks.table import Broker

    if options.mqtt_host is None:
        return None
    return Broker(
        options.mqtt_host,
        options.mqtt_port,
        options.topic_prefix,
        username=os.environ.pop("TANDEM_MQTT_USERNAME", None),
        password=os.environ.pop("TANDEM_MQTT_PASSWORD", None),
        tls=_tls(os.environ),
    )


def _open_tap(path: Path, config: PipelineConfig, models: "Mapping[str, Model]") -> "Tap":
    """Return what lets a new release run in the shadow of this one."""
    from pipelines.shadow.tap import Tap

    cameras = [camera.id for camera in config.cameras]
    labels = models[config.first.name].labels
    return Tap(path, pipeline=config.name, labels=labels, cameras=cameras)


def _tls(environment: Mapping[str, str]) -> TlsFiles | None:
    """Return the files of TLS that the agent names; None: a plain connection."""
    ca, certificate, key = (
        environment.get(f"TANDEM_MQTT_{name}") for name in ("CA", "CERTIFICATE", "KEY")
    )
    if ca is None:
        return None
    return TlsFiles(
        Path(ca),
        None if certificate is None else Path(certificate),
        None if key is None else Path(key),
    )


def _sources_here(texts: Sequence[str]) -> Callable[[PipelineConfig], PipelineConfig]:
    """Return what puts the addresses of this machine into a pipeline: those of the command line, or
    of the agent, which gives one in TANDEM_SOURCE or several as JSON in TANDEM_SOURCES."""
    one = os.environ.pop("TANDEM_SOURCE", None)
    several: dict[str, str] = json.loads(os.environ.pop("TANDEM_SOURCES", "{}"))

    def adapt(config: PipelineConfig) -> PipelineConfig:
        config = config.with_sources(several)
        for text in texts if one is None else (one,):
            config = config.with_source(text)
        return config

    return adapt


def _open_session(profile: str, engine: Engine, dla_core: int | None, turn: int | None) -> Session:
    return Session(engine, profile=profile, dla_core=dla_core, turn=turn)


def _output_files(
    options: argparse.Namespace,
    config: PipelineConfig,
    models: "Mapping[str, Model]",
    files: "Mapping[str, ModelFiles]",
) -> "OutputFiles":
    """Return the files of a person's run, or of a release: its folder is named by its content.

    A release without files needs no folder: it runs on a full disk too.
    """
    from pipelines.sinks.files import OutputFiles, release_folder, writes_files

    if options.data is None or not writes_files(config):
        return OutputFiles(overwrite=options.overwrite)
    content = hashlib.sha256("".join(model.engine_sha256 for model in models.values()).encode())
    for path in (options.bundle / PIPELINE, *(files[name].labels for name in models)):
        content.update(path.read_bytes())
    folder = release_folder(options.data, content.hexdigest()[:16])
    return OutputFiles(folder, quota_bytes=options.data_mb * 2**20)


def _check_reach(config: PipelineConfig, *, is_release: bool) -> None:
    """Raise PipelineError if a release names outputs that are not its own, or brings GStreamer
    elements, which may write anywhere. The board's own configuration may name these."""
    if is_release:
        check_release(config)
    for camera in config.cameras:
        if is_release and scheme_of(camera.uri) == "gst":
            raise PipelineError(
                f"pipeline {config.name!r} reads from {redact(camera.uri)!r}: a release may not"
                " bring GStreamer elements; name this source in agent.toml on the board."
            )


class _PrintVariables(argparse.Action):
    """Print what GStreamer needs, and end; argparse's own action for texts breaks lines."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print it."""
        print(shell_variables())
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="tandem-pipeline", description="Run the pipeline of an unpacked bundle."
    )
    parser.add_argument(
        "--bundle",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of an unpacked bundle, or with pipeline.toml and the files that it names",
    )
    parser.add_argument(
        "--profile", required=True, metavar="NAME", help="the device profile of this machine"
    )
    parser.add_argument("--mqtt-host", metavar="HOST", help="broker for the mqtt sink")
    parser.add_argument("--mqtt-port", type=int, default=1883, metavar="PORT")
    parser.add_argument("--topic-prefix", default="fleet/v1/local", metavar="PREFIX")
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="URI",
        help="read from here, not from [source]; ID=URI for one of several, any number of times",
    )
    parser.add_argument(
        "--wait-for-source", action="store_true", help="a camera may be away at the start"
    )
    parser.add_argument("--overwrite", action="store_true", help="sinks may replace files")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="sinks write only below a folder in this one"
    )
    parser.add_argument(
        "--data-mb", type=_positive, default=1024, metavar="N", help="quota of that folder in MiB"
    )
    parser.add_argument(
        "--services",
        choices=("true", "false"),
        default="true",
        help="whether a pipeline of kind service may run its program",
    )
    parser.add_argument(
        "--tap", type=Path, metavar="FILE", help="socket on which a shadow may ask for frames"
    )
    parser.add_argument(
        "--gstreamer",
        action=_PrintVariables,
        nargs=0,
        help='print what lets GStreamer find the element tandeminfer, for eval "$(...)", and exit',
    )
    parser.add_argument("--frames", type=_positive, metavar="N", help="stop after N frames")
    return parser


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
