"""Kill the broker and a site's agents together: is the state of each device true one beat later?

A real mosquitto with TLS, `tandem fleet serve`, and real signed agents without a release, all as
processes. The first of them are killed with the broker (-9), which starts again at once.

python -m scripts.outage --agents 60 --kill 10 --beat 30
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from device.errors import BrokerError
from scripts.chaos_parts import START_S, Part, listens
from toolkit.fleet.authority import Authority
from toolkit.fleet.brokers.local import free_port
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.folder import make_fleet
from toolkit.fleet.server.views import device_views
from toolkit.fleet.trust.certificates import issue_device

PROFILE = "agx-orin-64gb"
READY_S = 300.0
LOOK_S = 0.5
SLACK = 3  # intervals until it is given up
AGENT = """\
device = "{name}"
profile = "{profile}"
state_dir = "state"
labels = {{site = "{site}"}}
[trust]
dir = "{trust}"
[broker]
host = "127.0.0.1"
port = {port}
beat_s = {beat_s}
tls = {{ca = "{tls}/ca.crt", certificate = "{tls}/{name}.crt", key = "{tls}/{name}.key"}}
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was seen. `states`: devices by state one interval after the broker was back; `wrong`:
    those of which it is not true then; `true_after_s`: when all were true, None: never.
    `false_online_s`: when a dead device was last called online; `outages`: as `status` has them."""

    agents: int
    killed: int
    beat_s: float
    broker_away_s: float
    states: dict[str, int]
    wrong: tuple[str, ...]
    true_after_s: float | None
    false_online_s: float
    outages: tuple[tuple[str, int, int], ...]


class Stand:
    """The processes of one run, below a folder."""

    def __init__(self, folder: Path, agents: int, killed: int, beat_s: float) -> None:
        self.fleet, self.beat_s = folder / "fleet", beat_s
        self.port = free_port()
        self.dead = [f"d{number:03}" for number in range(killed)]
        self.names = [f"d{number:03}" for number in range(agents)]
        make_fleet(self.fleet, name="outage", broker=f"127.0.0.1:{self.port}")
        mark = folder.name
        binary = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin")
        if binary is None:
            raise BrokerError("mosquitto is missing: apt-get install mosquitto")
        conf = str(self.fleet / "broker" / "mosquitto.conf")
        self.broker = Part([binary, "-c", conf], folder / "broker.log", mark)
        serve = ("-m", "toolkit.cli", "fleet", "serve", "--fleet", str(self.fleet))
        self.server = Part([sys.executable, *serve], folder / "server.log", mark)
        self.agents = {name: self._agent(folder / name, name, mark) for name in self.names}

    def _agent(self, folder: Path, name: str, mark: str) -> Part:
        folder.mkdir()
        issue_device(Authority(self.fleet / "identity"), name, folder / "tls")
        site = "dark" if name in self.dead else "lit"
        text = AGENT.format(
            name=name, profile=PROFILE, port=self.port, beat_s=self.beat_s, site=site,
            tls=folder / "tls", trust=self.fleet / "trust",
        )  # fmt: skip
        (folder / "agent.toml").write_text(text)
        command = [sys.executable, "-m", "device.agent", "--config", str(folder / "agent.toml")]
        return Part(command, folder / "agent.log", mark)

    def start_broker(self) -> None:
        """Start the broker, and wait until it accepts connections."""
        self.broker.start()
        until_s = time.monotonic() + START_S
        while not listens(self.port):
            if time.monotonic() > until_s:
                raise BrokerError(f"mosquitto does not listen on {self.port}")
            time.sleep(0.02)

    def ask(self, *words: str) -> list[dict[str, object]]:
        """Return what a command of the fleet says in JSON."""
        done = subprocess.run(
            [sys.executable, "-m", "toolkit.cli", "fleet", *words, "--json", "--fleet",
             str(self.fleet)],
            stdout=subprocess.PIPE, check=True,
        )  # fmt: skip
        rows: list[dict[str, object]] = json.loads(done.stdout)
        return rows

    def states(self) -> dict[str, str]:
        """Return the state of each device, from the store."""
        database = load_fleet(self.fleet).open_store()
        try:
            return {view.id: view.state for view in device_views(database)}
        finally:
            database.close()

    def said_states(self) -> dict[str, str]:
        """Return the state of each device, as `tandem fleet devices` says."""
        return {str(row["id"]): str(row["state"]) for row in self.ask("devices")}

    def truth(self) -> dict[str, str]:
        """Return what is to be said once the devices are dead."""
        return {name: "silent" if name in self.dead else "online" for name in self.names}

    def end(self) -> None:
        """End all processes."""
        for part in (*self.agents.values(), self.server, self.broker):
            part.kill()


@contextlib.contextmanager
def running(agents: int, killed: int, beat_s: float) -> Iterator[Stand]:
    """Yield a stand whose devices are all online."""
    with tempfile.TemporaryDirectory(prefix="tandem-outage-") as name:
        stand = Stand(Path(name), agents, killed, beat_s)
        try:
            stand.start_broker()
            stand.server.start()
            for agent in stand.agents.values():
                agent.start()
            until_s = time.monotonic() + READY_S
            while stand.states() != dict.fromkeys(stand.names, "online"):
                if time.monotonic() > until_s:
                    raise BrokerError(f"not all are online: {Counter(stand.states().values())}")
                time.sleep(LOOK_S)
            yield stand
        finally:
            stand.end()


def measure(
    agents: int, killed: int, beat_s: float, report: Callable[[str], None] = lambda _line: None
) -> Outcome:
    """Kill the broker and the first `killed` agents, and watch what is said of all."""
    with running(agents, killed, beat_s) as stand:
        report(f"{agents} agents are online; the broker and {killed} agents are killed")
        begun_s = time.monotonic()
        stand.broker.kill()
        for name in stand.dead:
            stand.agents[name].kill()
        stand.start_broker()
        back_s = time.monotonic()
        truth, at_beat, true_after_s, false_s = stand.truth(), {}, None, 0.0
        while true_after_s is None or not at_beat:
            asked_s = time.monotonic() - back_s  # the answer is not older
            states = stand.states()
            if any(states[name] == "online" for name in stand.dead):
                false_s = asked_s
            if asked_s >= beat_s and not at_beat:
                at_beat = stand.said_states()
            if states == truth and true_after_s is None:
                true_after_s = time.monotonic() - back_s
            if asked_s > SLACK * beat_s + START_S:
                break
            report(f"{asked_s:6.1f} s  {dict(Counter(states.values()))}")
            time.sleep(LOOK_S)
        rows = [row for row in stand.ask("status") if row["kind"] == "silent"]
    return Outcome(
        agents=agents,
        killed=killed,
        beat_s=beat_s,
        broker_away_s=round(back_s - begun_s, 2),
        states=dict(Counter(at_beat.values())),
        wrong=tuple(name for name, state in at_beat.items() if truth[name] != state),
        true_after_s=None if true_after_s is None else round(true_after_s, 1),
        false_online_s=round(false_s, 1),
        outages=tuple(
            (str(row["name"]), len(_list(row["devices"])), int(str(row["of"]))) for row in rows
        ),
    )


def _list(value: object) -> list[object]:
    assert isinstance(value, list)
    return value


def main(words: Sequence[str] | None = None) -> int:
    """Run and print; return 1 if one interval later something is not true."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--agents", type=int, default=60)
    parser.add_argument("--kill", type=int, default=10, help="so many agents with the broker")
    parser.add_argument("--beat", type=float, default=30.0, help="beat_s of the agents")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(words)
    outcome = measure(
        arguments.agents, arguments.kill, arguments.beat,
        lambda line: print(line, file=sys.stderr, flush=True),
    )  # fmt: skip
    if arguments.json:
        print(json.dumps(asdict(outcome)))
    else:
        for name, value in asdict(outcome).items():
            print(f"{name:16} {value}")
    return 1 if outcome.wrong or outcome.true_after_s is None else 0


if __name__ == "__main__":
    sys.exit(main())
