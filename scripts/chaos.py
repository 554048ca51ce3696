"""Hurt a board, its broker, camera, deployer and disk at random, and check all the time what holds.

    python -m scripts.chaos                          30 minutes, a seed of the clock
    python -m scripts.chaos --seed 7 --seconds 120   the same faults again

Everything is real: mosquitto, an RTSP camera, the agent, its pipeline, `tandem deploy`. The faults
and the invariants are the tables of `scripts/chaos_schedule.py`. Exit status 1: an invariant broke;
the seed is printed, and the logs are kept.
"""

import argparse
import contextlib
import json
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from device.protocol.documents import Reported, StateDocument, decode
from device.protocol.mqtt import Link, LinkDown, LinkSettings, Message, queue_putter
from device.protocol.topics import Topics
from scripts import chaos_parts as parts
from scripts.chaos_checks import CHECKS, Observation
from scripts.chaos_schedule import INVARIANTS, Invariant, Step, schedule
from toolkit.fleet.brokers.local import free_port

TICK_S = 0.25
RESTART_S = 1.0  # the agent is started again after an exit, as systemd does
GIANT_BYTES = 8 * 2**20
TOPICS = Topics(parts.DEVICE)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Broken:
    """An invariant that did not hold at a time of the run, and what was seen."""

    invariant: str
    at_s: float
    seen: str


class Watcher:
    """Keeps the newest report and the state of the agent, from a connection of its own."""

    def __init__(self, port: int) -> None:
        self._events: queue.Queue[object] = queue.Queue()
        self._ended = threading.Event()
        subscriptions = ((TOPICS.reported, 1), (TOPICS.state, 1))
        settings = LinkSettings("127.0.0.1", port, "chaos-watcher", subscriptions)
        self._link = Link(settings, queue_putter(self._events, self._ended))
        self._link.start()
        self.report: Reported | None = None
        self.online = False

    def look(self) -> None:
        """Take all that has arrived."""
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                if isinstance(event, LinkDown):
                    self.online, self.report = False, None
                elif isinstance(event, Message) and event.payload:
                    self._take(event)

    def _take(self, message: Message) -> None:
        with contextlib.suppress(ValueError):
            if message.topic == TOPICS.reported:
                self.report = decode(message.payload, Reported)
            else:
                self.online = decode(message.payload, StateDocument).state == "online"

    def publish(self, topic: str, payload: bytes) -> None:
        """Publish a retained message, if there is a connection."""
        self._link.publish(topic, payload, qos=1, retain=True)

    def close(self) -> None:
        """End the connection."""
        self._ended.set()
        self._link.close()


@dataclass(frozen=True, slots=True)
class _Open:
    """A fault that goes on: when it ends, and what ends it."""

    part: str
    until_s: float
    heal: Callable[[], None]


class Chaos:
    """A run: the parts, the faults that are open, and since when each invariant does not hold."""

    def __init__(self, folder: Path, seed: int, patience: float, say: Say) -> None:
        self._folder, self._say, self._patience = folder, say, patience
        self._mark = f"{seed}-{os.getpid()}"
        self._bundles = parts.make_releases(folder)
        broker_port, camera_port = free_port(), free_port()
        self._wires = {"broker": parts.Wire(broker_port), "camera": parts.Wire(camera_port)}
        self._broker_port = broker_port
        camera = f"rtsp://127.0.0.1:{self._wires['camera'].port}/cam"
        ends = (self._wires["broker"].port, camera)
        self._parts = {
            "broker": parts.broker_part(folder, broker_port, self._mark),
            "camera": parts.camera_part(folder, camera_port, self._mark),
            "agent": parts.agent_part(folder, *ends, self._mark),
        }
        self._deployers: list[parts.Part] = []
        self._open: list[_Open] = []
        self._held: set[str] = set()  # parts that a fault keeps from being started again
        self._wrong_since: dict[str, float] = {}
        self._unquiet_s: dict[str, float] = {}  # part: when a fault last hurt it
        self._agent_restart_s = 0.0
        self.ticks = 0
        self.broken: list[Broken] = []

    def run(self, steps: Sequence[Step], seconds: float) -> None:
        """Carry out the steps; end at the first invariant that breaks, or after `seconds`."""
        for name in ("broker", "camera", "agent"):
            self._parts[name].start()
        _wait(lambda: parts.listens(self._broker_port), "the broker listens")
        self._watcher = Watcher(self._broker_port)
        try:
            self._send("one")
            _wait(lambda: self._live("one"), "the first release is live")
            self._begin = time.monotonic()
            self._follow(list(steps), seconds)
            if not self.broken:
                self._recover()
        finally:
            self._close()

    def _live(self, name: str) -> bool:
        self._watcher.look()
        report = self._watcher.report
        return report is not None and report.running is not None and report.running.name == name

    def _follow(self, steps: list[Step], seconds: float) -> None:
        while not self.broken and (now_s := self._now()) < seconds:
            while steps and steps[0].at_s <= now_s:
                self._hurt(steps.pop(0))
            self._tick()
            time.sleep(TICK_S)

    def _now(self) -> float:
        return time.monotonic() - self._begin

    def _tick(self) -> None:
        now_s = time.monotonic()
        hurt = {row.part for row in self._open}
        hurt |= {name for name, part in self._parts.items() if not part.alive}
        for row in [row for row in self._open if row.until_s <= now_s]:
            self._open.remove(row)
            row.heal()
        self._unquiet_s |= dict.fromkeys(hurt, time.monotonic())
        self._keep_agent(now_s)
        sight = self._sight()
        self.ticks += 1
        for invariant in INVARIANTS:
            self._judge(invariant, sight, now_s)

    def _judge(self, invariant: Invariant, sight: Observation, now_s: float) -> None:
        seen = CHECKS[invariant.name](sight)
        if not seen:
            self._wrong_since.pop(invariant.name, None)
            return
        others = (at for part, at in self._unquiet_s.items() if part != invariant.despite)
        since = max(self._wrong_since.setdefault(invariant.name, now_s), *others, 0.0)
        if now_s - since > invariant.grace_s * self._patience:
            self.broken.append(Broken(invariant.name, self._now(), seen))

    def _sight(self) -> Observation:
        self._watcher.look()
        state = self._folder / "state"
        return Observation(
            processes=parts.processes(self._mark),
            agent_pid=self._parts["agent"].pid,
            report=self._watcher.report,
            online=self._watcher.online,
            camera_up=self._parts["camera"].alive
            and all(row.part != "camera" for row in self._open),
            state_bytes=bytes_below(state),
            slots=sum(1 for slot in ("a", "b") if (state / "slots" / slot).is_dir()),
        )

    def _keep_agent(self, now_s: float) -> None:
        """Start an agent that ended by itself, as systemd would."""
        agent = self._parts["agent"]
        if agent.alive or "agent" in self._held:
            self._agent_restart_s = now_s + RESTART_S
        elif now_s >= self._agent_restart_s:
            self._say("the agent ended and is started again")
            agent.start()

    # -- faults

    def _hurt(self, step: Step) -> None:
        self._say(f"{step.at_s:8.1f} s  {step.part} {step.action} {step.for_s:.1f} s")
        self._unquiet_s[step.part] = time.monotonic()
        getattr(self, f"_{step.action}")(step)

    def _later(self, step: Step, heal: Callable[[], None]) -> None:
        self._open.append(_Open(step.part, time.monotonic() + step.for_s, heal))

    def _kill(self, step: Step) -> None:
        if step.part == "pipeline":
            for row in self._sight().pipelines:
                _signal(row.pid, signal.SIGKILL)
        elif step.part == "deployer":
            for deployer in self._deployers:
                deployer.kill()
        else:
            self._parts[step.part].kill()
            self._restart_later(step)

    def _end(self, step: Step) -> None:
        self._parts[step.part].end()
        self._restart_later(step)

    def _restart_later(self, step: Step) -> None:
        self._held.add(step.part)

        def restart() -> None:
            self._held.discard(step.part)
            self._parts[step.part].start()

        self._later(step, restart)

    def _freeze(self, step: Step) -> None:
        pids = [part.pid for part in self._deployers]
        if step.part == "pipeline":
            pids = [row.pid for row in self._sight().pipelines]
        elif step.part != "deployer":
            pids = [self._parts[step.part].pid]
        frozen = [pid for pid in pids if pid]
        for pid in frozen:
            _signal(pid, signal.SIGSTOP)

        def go_on() -> None:
            for pid in frozen:
                _signal(pid, signal.SIGCONT)

        self._later(step, go_on)

    def _cut(self, step: Step) -> None:
        wire = self._wires[step.part]
        wire.cut()
        self._later(step, wire.mend)

    def _fill(self, step: Step) -> None:
        pid = self._parts["agent"].pid
        if pid:
            parts.fill_disk(pid, full=True)
            self._later(step, lambda: parts.fill_disk(pid, full=False))

    def _deploy(self, step: Step) -> None:
        self._send(step.release)

    def _send(self, release: str, *options: str) -> None:
        for deployer in self._deployers:  # one at a time, as its own rules want
            deployer.kill()
        port = self._wires["broker"].port
        bundle = self._bundles[release]
        deployer = parts.deployer_part(self._folder, bundle, port, self._mark, *options)
        deployer.start()
        self._deployers = [deployer]

    def _garbage(self, step: Step) -> None:
        self._publish(TOPICS.desired, b'{"format": 1, "request": 7}')

    def _giant(self, step: Step) -> None:
        self._publish(TOPICS.chunk("0" * 64, 0, "chaos"), bytes(GIANT_BYTES))

    def _publish(self, topic: str, payload: bytes) -> None:
        self._watcher.publish(topic, payload)

    # -- the end

    def _recover(self) -> None:
        """After all faults a release is taken as if nothing had happened.

        With --retry: a fault may have hit its trial.
        """
        self._heal_all()
        self._say("recover: deploy release two")
        until = time.monotonic() + 60.0 * self._patience
        self._send("two", "--retry")
        while not self.broken and not self._live("two"):
            if time.monotonic() > until:
                self.broken.append(
                    Broken("recovers", self._now(), f"the last report: {self._watcher.report}")
                )
                return
            if not self._deployers[0].alive:
                self._send("two", "--retry")
            self._tick()
            time.sleep(TICK_S)

    def _heal_all(self) -> None:
        for row in self._open:
            row.heal()
        self._unquiet_s |= dict.fromkeys((row.part for row in self._open), time.monotonic())
        self._open.clear()

    def _close(self) -> None:
        self._heal_all()
        self._watcher.close()
        for part in (*self._deployers, self._parts["agent"]):
            part.end()
        for name in ("camera", "broker"):
            self._parts[name].send(signal.SIGCONT)
            self._parts[name].kill()
        for wire in self._wires.values():
            wire.close()
        for pid in parts.processes(self._mark):
            _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def bytes_below(folder: Path) -> int:
    """The bytes of all files below `folder`; the agent may remove any of them meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):  # skips a folder that is gone, unlike Path.rglob
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _wait(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 2 * parts.START_S
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"never: {what}")
        time.sleep(0.05)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; exit status 1 if an invariant broke."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, help="of the faults (the clock)")
    parser.add_argument("--seconds", type=float, default=1800.0, help="how long (1800)")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="factor on all times of grace (1)"
    )
    parser.add_argument("--keep", type=Path, help="folder for the logs (kept after a failure)")
    parser.add_argument("--list", action="store_true", help="print the faults and do nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else time.time_ns() // 10**6 % 10**6
    steps = schedule(seed, options.seconds)
    if options.list:
        for step in steps:
            print(step)
        return 0
    folder = options.keep or Path(tempfile.mkdtemp(prefix=f"tandem-chaos-{seed}-"))
    folder.mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    chaos = Chaos(folder, seed, options.patience, lambda line: print(line, file=sys.stderr))
    chaos.run(steps, options.seconds)
    _report(chaos, seed, len(steps), options.seconds, folder, as_json=options.json)
    if not chaos.broken and options.keep is None:
        shutil.rmtree(folder)
    return 1 if chaos.broken else 0


def _report(
    chaos: Chaos, seed: int, steps: int, seconds: float, folder: Path, *, as_json: bool
) -> None:
    if as_json:
        rows = [{"invariant": b.invariant, "at_s": b.at_s, "seen": b.seen} for b in chaos.broken]
        row = {"seed": seed, "faults": steps, "ticks": chaos.ticks, "broken": rows}
        print(json.dumps({**row, "folder": str(folder)}))
        return
    print(f"seed {seed}: {steps} faults, {chaos.ticks} looks, {len(chaos.broken)} broken")
    for broken in chaos.broken:
        print(f"{broken.invariant} at {broken.at_s:.1f} s: {broken.seen}")
        print(
            f"replay: python -m scripts.chaos --seed {seed} --seconds {seconds:g}; logs: {folder}"
        )


if __name__ == "__main__":
    sys.exit(main())
