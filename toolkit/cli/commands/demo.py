"""`tandem demo`: build, run and update on this machine, then report."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.cli.command import FILE, NEW_FOLDER, command, json_option, option
from toolkit.cli.options.model import profile_option


@dataclass(frozen=True, slots=True)
class Demo:
    """Calibrate, plan, build, run, deploy over MQTT, and roll back, on this machine.

    Exit status 0 only if detections arrived, INT8 held its accuracy, and the broken release was
    rolled back.

    Example: tandem demo --profile orin-nx-16gb --source rtsp://10.0.0.7/stream
    """

    profile: str = profile_option("agx-orin-64gb")
    source: str | None = option(
        "Video, folder of images, v4l2:// or rtsp://. [default: a rendered video]", metavar="URI"
    )
    model: Path | None = option(
        "A detector of the shipped classes, with its model file (.toml) beside it.", type=FILE
    )
    out: Path = option("Output folder.", type=NEW_FOLDER, default=Path("demo-out"))
    as_json: bool = json_option()


demo = command(Demo, "demo:demo")  # fmt: skip
