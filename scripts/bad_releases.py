"""Deploy bad releases to a real agent: after how many seconds does something give frames again?

    python -m scripts.bad_releases                  every row; a table
    python -m scripts.bad_releases --only freezes   the rows with this in their name
    python -m scripts.bad_releases --repeat 3 --json

Broker, agent and `tandem deploy` are real. The pipeline is a double, since the real one has no
such faults: it says the same messages, holds its camera as a lock, and from its fault on runs the
row's code. Before the fault it gives ten frames a second. A release that fails in its trial must
never be live, and the one before must run again; one that fails when it is live is started again.
At the end come good releases that are slow: they must be live and never be started twice.

Exit status 1: a row took longer than its limit, or the wrong release runs.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from device.errors import BrokerError
from device.update.bundle import write_bundle
from scripts.chaos_parts import START_S, Part, listens
from toolkit.fleet.brokers.address import BrokerAddress
from toolkit.fleet.brokers.local import free_port
from toolkit.fleet.transports.deploy import DeployOptions, deploy_bundle
from toolkit.fleet.transports.device_deployment import DeployResult

LIMIT_S = 5.0  # from the fault to the next frame
WAIT_S = 60.0
TRIAL_FAULT_S = 1.0  # after the first frame; the trial lasts 2 s
MEMORY_MB = 200
PROFILE = "laptop"

DOUBLE = '''
import fcntl, json, os, signal, subprocess, sys, threading, time
from pathlib import Path

bundle = Path(sys.argv[sys.argv.index("--bundle") + 1])
folder = Path(sys.argv[0]).parent
row = json.loads((bundle / "pipeline.toml").read_text()[2:])
notes = (folder / "notes").open("a", buffering=1)
frames = errors = 0

def note(what):
    notes.write(json.dumps([time.monotonic(), what, row["name"], os.getpid()]) + "\\n")

def say(kind, **fields):
    print(json.dumps({"kind": kind, **fields}), flush=True)

def beat(state="running", **fields):
    say("heartbeat", frames=frames, errors=errors, state=state, **fields)

def frame(**fields):
    global frames
    frames += 1
    if frames == 1:
        say("result", seq=0, latency_ms=1.0)
    note("frame")
    beat(**fields)

def go_on(until=lambda: False):
    while not until():
        frame()
        time.sleep(0.1)

def apart(code):
    """Run code in another session, with an empty environment, and without this parent."""
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.execve(sys.executable, [sys.executable, "-c", code], {})
    os.wait()

TAKE = "parts = []\\nwhile True: parts.append(bytearray(b'x') * (16 << 20))"
note("start")
camera = open(folder / "camera", "w")
exec(row["first"])
while True:
    try:
        fcntl.flock(camera, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
    except BlockingIOError:
        beat("degraded", reason="the camera is in use")
        time.sleep(0.1)
say("ready", pipeline=row["name"], engine_sha256="0" * 64)
began_s = time.monotonic()
armed = folder / f"go-{row['name']}"
go_on(lambda: armed.exists() if row["when"] == "live" else time.monotonic() > began_s + row["at_s"])
if row["when"] == "live":
    armed.unlink(missing_ok=True)
if row["code"]:
    note("fault")
    exec(row["code"])
go_on()
'''

LAUNCHER = """
import logging, sys
from dataclasses import replace
from pathlib import Path
from device.agent.agent import serve
from device.agent.config import load_agent_config
from device.agent.pipeline_process import PIPELINE

logging.basicConfig(level=logging.INFO)
serve(load_agent_config(Path(sys.argv[1])), replace(PIPELINE, prefix=(sys.executable, sys.argv[2])))
"""

AGENT = """\
device = "board"
profile = "{profile}"
state_dir = "state"
dev = true
[broker]
host = "127.0.0.1"
port = {port}
[update]
confirm_after_s = 2.0
[pipeline]
memory_mb = {memory_mb}
"""

When = Literal["start", "trial", "live", "good"]


@dataclass(frozen=True, slots=True)
class Row:
    """A release. `when`: its fault comes at its start, in its trial, once it is live, or it has
    none. `code`: what it does then, in the double; `first`: before it opens its camera."""

    name: str
    when: When
    code: str = ""
    first: str = ""
    limit_s: float = LIMIT_S


HANG = "threading.Event().wait()"
ROWS: tuple[Row, ...] = (
    Row("ends at its start with status 3", "start", first="note('fault'); sys.exit(3)"),
    Row("hangs at its start", "start", first=f"note('fault'); {HANG}"),
    Row("spins at its start behind a flood", "start",
        first="note('fault')\nwhile True: print('x' * 100)", limit_s=15.0),
    Row("says a failure and hangs", "start",
        first=f"note('fault'); say('failure', message='no engine'); {HANG}"),
    Row("ends with status 1", "trial", "sys.exit(1)"),
    Row("ends with status 0", "trial", "sys.exit(0)"),
    Row("is killed by SIGSEGV", "trial", "os.kill(os.getpid(), signal.SIGSEGV)"),
    Row("freezes by SIGSTOP", "trial", "os.kill(os.getpid(), signal.SIGSTOP)"),
    Row("hangs without a heartbeat", "trial", HANG),
    Row("hangs and ignores SIGTERM", "trial",
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {HANG}"),
    Row("floods stdout without a heartbeat", "trial", "while True: print('x' * 100)"),
    Row("floods with messages, without a heartbeat", "trial",
        "while True: say('reload', ok=True)"),
    Row("keeps its heart without frames", "trial", "while True: beat(); time.sleep(0.1)"),
    Row("loses every frame to an error", "trial",
        "while True: errors += 9; frame(); time.sleep(0.1)"),
    Row("ends when it is live with status 1", "live", "sys.exit(1)"),
    Row("aborts when it is live", "live", "os.abort()"),
    Row("freezes by SIGSTOP when it is live", "live", "os.kill(os.getpid(), signal.SIGSTOP)"),
    Row("hangs when it is live", "live", HANG),
    Row("spins when it is live", "live", "while True: pass"),
    Row("floods stdout when it is live", "live", "while True: print('x' * 100)"),
    Row("writes a line without an end when it is live", "live",
        "while True: sys.stdout.write('x' * 4096)"),
    Row("keeps its heart without frames when it is live", "live",
        "while True: beat(); time.sleep(0.1)"),
    Row("closes stdout when it is live", "live", f"os.close(1); {HANG}"),
    Row("says moments and counts that cannot be", "live",
        "beat('degraded', reason='away', since_s=-1e300); say('ready', pipeline='', "
        "engine_sha256='', warm_up_s=1e300); frames = 2**53; beat(since_s=1e300); sys.exit(1)"),
    Row("takes memory when it is live", "live", "exec(TAKE)"),
    Row("takes memory in a lost process", "live", "apart(TAKE); go_on()"),
    Row("leaves a lost process with its camera", "live",
        "os.set_inheritable(camera.fileno(), True); "
        "apart('import time; time.sleep(600)'); sys.exit(1)"),
    Row("freezes its keeper and itself", "live",
        "os.kill(os.getppid(), signal.SIGSTOP); os.kill(os.getpid(), signal.SIGSTOP)"),
    Row("leaves a hundred processes", "live",
        "[apart('import time; time.sleep(600)') for _ in range(100)]; sys.exit(1)", limit_s=10.0),
    Row("loads for 8 s", "good",
        first="until = time.monotonic() + 8\nwhile time.monotonic() < until: pass"),
    Row("gives a frame each 4 s", "good",
        "while True:\n frame(gap_s=8.0)\n for _ in range(8): beat(gap_s=8.0); time.sleep(0.5)"),
    Row("says that its camera is away for 8 s", "good",
        "for _ in range(16): beat('degraded', reason='no camera'); time.sleep(0.5)"),
    Row("takes 3 s for each frame", "good",
        "while True: frame(gap_s=9.0, quiet_s=9.0); time.sleep(3)"),
    Row("floods stderr and works", "good",
        "while True: print('x' * 200, file=sys.stderr); frame(); time.sleep(0.01)"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a row. `seconds`: from the fault to the next frame, None: never, or none is
    owed; `says`: what the agent says of it; `wrong`: what did not hold."""

    name: str
    when: str
    seconds: float | None
    says: str
    wrong: str


@dataclass(frozen=True, slots=True)
class Note:
    """A line of the double: `what` is start, frame or fault."""

    at_s: float
    what: str
    release: str
    pid: int


class Stand:
    """A broker and an agent, below a folder, with a good release that is live."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        binary = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin")
        if binary is None:
            raise BrokerError("mosquitto is missing: apt-get install mosquitto")
        listener = f"user root\nlistener {self.port} 127.0.0.1\nallow_anonymous true\n"
        (folder / "broker.conf").write_text(listener)
        (folder / "double.py").write_text(DOUBLE)
        (folder / "launch.py").write_text(LAUNCHER)
        config = folder / "agent.toml"
        config.write_text(AGENT.format(profile=PROFILE, port=self.port, memory_mb=MEMORY_MB))
        mark = folder.name
        broker = [binary, "-c", str(folder / "broker.conf")]
        self.broker = Part(broker, folder / "broker.log", mark)
        launch = [sys.executable, *map(str, (folder / "launch.py", config, folder / "double.py"))]
        self.agent = Part(launch, folder / "agent.log", mark)

    def deploy(self, row: Row, version: str) -> DeployResult:
        """Deploy a row's release; returns when it is live or is not going to be."""
        folder = self.folder / f"release-{version}"
        folder.mkdir()
        text = {**asdict(row), "at_s": TRIAL_FAULT_S if row.when == "trial" else 0.0}
        (folder / "pipeline.toml").write_text(f"# {json.dumps(text)}")
        (folder / "model.engine").write_bytes(b"a double needs no engine")
        (folder / "labels.txt").write_text("thing\n")
        bundle = folder / "release.bundle"
        write_bundle(
            bundle, engine=folder / "model.engine", pipeline=folder / "pipeline.toml",
            labels=folder / "labels.txt", name="release", version=version, profile=PROFILE,
        )  # fmt: skip
        address = BrokerAddress("127.0.0.1", self.port)
        return deploy_bundle(bundle, ("board",), address, DeployOptions(WAIT_S))[0]

    def notes(self) -> list[Note]:
        """Return what releases have written so far."""
        path = self.folder / "notes"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [Note(*json.loads(line)) for line in lines]

    def says(self) -> str:
        """Return the last that the agent said of its pipeline."""
        lines = (self.folder / "agent.log").read_text(errors="replace").splitlines()
        pipeline_lines = [line for line in lines if "the pipeline" in line and "xxxx" not in line]
        return pipeline_lines[-1].split(":", 2)[-1].strip() if pipeline_lines else ""


@contextmanager
def standing() -> Iterator[Stand]:
    """Start broker and agent, and deploy a good release; all ends with the block."""
    with tempfile.TemporaryDirectory() as name:
        stand = Stand(Path(name))
        try:
            stand.broker.start()
            wait_until(lambda: listens(stand.port), START_S)
            stand.agent.start()
            result = stand.deploy(Row("the release before", "good"), "0")
            if not result.live:
                raise RuntimeError(f"the good release is {result.phase}: {result.reason}")
            yield stand
        finally:
            stand.agent.end()
            stand.broker.end()


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition; return whether it came."""
    until_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)
    return True


def measure(row: Row) -> Outcome:
    """Deploy a row to an agent of its own, and see what becomes of it."""
    with standing() as stand:
        result = stand.deploy(row, "1")
        if row.when == "good":
            return _judge_good(row, stand, result)
        if row.when == "live":
            if not result.live:
                return Outcome(row.name, row.when, None, result.reason, "it was not live")
            (stand.folder / f"go-{row.name}").touch()
        seconds: list[float] = []

        def again() -> bool:
            notes = stand.notes()
            faults = [note for note in notes if note.what == "fault"]
            # A loss of every frame is a fault although frames come: the release before is owed.
            frames = [
                note.at_s - faults[0].at_s
                for note in notes
                if faults and note.what == "frame" and note.at_s > faults[0].at_s
                and note.pid != faults[0].pid
            ]  # fmt: skip
            seconds.extend(frames[:1])
            return bool(frames)

        wait_until(again, WAIT_S)
        taken_s = round(seconds[0], 2) if seconds else None
        says = result.reason if row.when != "live" else stand.says()
        return Outcome(row.name, row.when, taken_s, says, _wrong(row, stand, result, taken_s))


def _wrong(row: Row, stand: Stand, result: DeployResult, taken_s: float | None) -> str:
    if taken_s is None:
        return f"no frame within {WAIT_S:g} s"
    if row.when != "live" and result.phase != "rolled_back":
        return f"it is {result.phase}"
    last = stand.notes()[-1].release
    owed = row.name if row.when == "live" else "the release before"
    if last != owed:
        return f"{last} runs"
    return f"more than {row.limit_s:g} s" if taken_s > row.limit_s else ""


def _judge_good(row: Row, stand: Stand, result: DeployResult) -> Outcome:
    time.sleep(12.0 if result.live else 0.0)
    starts = [note for note in stand.notes() if note.what == "start" and note.release == row.name]
    wrong = "" if result.live else f"it is {result.phase}"
    if len(starts) != 1:
        wrong = f"it was started {len(starts)} times"
    return Outcome(row.name, row.when, None, result.reason, wrong)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a table of Markdown: of each row the median and the worst."""
    lines = ["| release | fault | s, median (worst) | the agent says |", "|---|---|--:|---|"]
    for name in dict.fromkeys(one.name for one in outcomes):
        rows = [one for one in outcomes if one.name == name]
        taken_s = [one.seconds for one in rows if one.seconds is not None]
        time_text = f"{statistics.median(taken_s):.1f} ({max(taken_s):.1f})" if taken_s else ""
        wrong = "; ".join(dict.fromkeys(one.wrong for one in rows if one.wrong))
        says = (f"**{wrong}**; " if wrong else "") + rows[-1].says.replace("|", "/")[:160]
        lines.append(f"| {name} | {rows[0].when} | {time_text} | {says} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows and print what came out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows with this in their name")
    parser.add_argument("--when", default="", help="start, trial, live or good")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    rows = [row for row in ROWS if options.only in row.name and options.when in row.when]
    if not rows:
        parser.error(f"no row has {options.only!r} in its name: {', '.join(r.name for r in ROWS)}")
    outcomes = []
    for number in range(options.repeat):
        for row in rows:
            outcomes.append(outcome := measure(row))
            taken = "" if outcome.seconds is None else f"{outcome.seconds:.1f} s"
            print(f"{number + 1} {row.name}: {taken} {outcome.wrong}", file=sys.stderr, flush=True)
    print(json.dumps([asdict(one) for one in outcomes]) if options.json else table(outcomes))
    return int(any(one.wrong for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
