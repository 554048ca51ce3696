"""The step `demo`: the shipped pipeline over pictures of the kit."""

import subprocess
import time
from pathlib import Path

import msgspec

from device.protocol.messages import Failure, decode_message
from device.selftest.kit import Kit, entries, unpack
from device.selftest.report import DemoRow
from device.start.command import module_command

FOLDER = "demo"
BUNDLE = "demo/bundle"
EVENTS = "events.jsonl"


class _Event(msgspec.Struct, frozen=True):
    """The part of an event that counts here."""

    detections: list[msgspec.Raw] = []


def run(kit: Kit, kit_folder: Path, folder: Path, item: str) -> DemoRow:
    """Run the pipeline to the end of its pictures."""
    unpack(kit_folder, entries(kit_folder, f"{FOLDER}/"), folder)
    events = folder / FOLDER / EVENTS
    events.unlink(missing_ok=True)
    command = module_command(
        "pipelines.__main__",
        *("--bundle", str(folder / BUNDLE), "--profile", kit.profile, "--overwrite"),
    )  # fmt: skip
    begin = time.monotonic()
    done = subprocess.run(command, cwd=folder / FOLDER, capture_output=True, check=False)
    seconds = time.monotonic() - begin
    messages = [decode_message(line) for line in done.stdout.splitlines()]
    failure = next((m.message for m in messages if isinstance(m, Failure)), "")
    if done.returncode and not failure:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        failure = lines[-1] if lines else f"it ended with status {done.returncode}"
    rows = events.read_bytes().splitlines() if events.exists() else []
    counts = [len(msgspec.json.decode(line, type=_Event).detections) for line in rows]
    return DemoRow(
        item=item,
        frames=len(rows),
        detections=sum(counts),
        seconds=seconds,
        problem=failure,
    )
