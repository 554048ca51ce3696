"""A real RabbitMQ for the tests: nodes with the files of a fleet, and what stands before a cluster.

Nothing of the machine's own RabbitMQ is touched: the nodes have their own folders, their own cookie
and their own port mapper (epmd).
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mqtt_fixtures import free_port, wait_for_port

from toolkit.fleet.brokers.mosquitto import BrokerFiles, Roster
from toolkit.fleet.brokers.rabbitmq import write_rabbitmq

SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
START_S = 240.0
FRUGAL = "+sbwt none +sbwtdcpu none +sbwtdio none"  # idle schedulers do not spin


@contextlib.contextmanager
def port_mapper(home: Path) -> Iterator[dict[str, str]]:
    """Run an epmd, and yield the environment of nodes and of rabbitmqctl."""
    assert SERVER.exists(), "RabbitMQ is missing: apt-get install rabbitmq-server"
    binary = shutil.which("epmd")
    assert binary, "epmd is missing: apt-get install rabbitmq-server"
    home.mkdir()
    port = free_port()
    process = subprocess.Popen([binary, "-port", str(port), "-address", "127.0.0.1"])
    try:
        wait_for_port(port, process)
        yield {"HOME": str(home), "ERL_EPMD_PORT": str(port)}
    finally:
        process.kill()
        process.wait()


@dataclass
class RabbitNode:
    """One node. `files.folder` has its configuration, written by `write_rabbitmq`."""

    files: BrokerFiles
    name: str
    environment: dict[str, str]
    process: "subprocess.Popen[bytes] | None" = None

    def write(self, roster: Roster, cluster: tuple[str, ...] = ()) -> None:
        """Write its files; with a `cluster` it joins these nodes at its first start."""
        write_rabbitmq(self.files, roster)
        conf = self.files.folder / "rabbitmq.conf"
        lines = ["cluster_formation.peer_discovery_backend = rabbit_peer_discovery_classic_config"]
        lines += [
            f"cluster_formation.classic_config.nodes.{number} = {name}"
            for number, name in enumerate(cluster, 1)
        ]
        if cluster:
            conf.write_text(conf.read_text() + "\n".join(lines) + "\n")

    def variables(self) -> dict[str, str]:
        """The environment of the node, and of rabbitmqctl that speaks to it."""
        return {
            **self.environment,
            "RABBITMQ_CONF_ENV_FILE": str(self.files.folder / "rabbitmq-env.conf"),
            "RABBITMQ_NODENAME": self.name,
        }

    def start(self) -> None:
        with (self.files.folder / "out").open("ab") as log:
            self.process = subprocess.Popen(
                [SERVER], stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, **self.variables(), "RABBITMQ_DIST_PORT": str(free_port()),
                    "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": FRUGAL},
            )  # fmt: skip
        wait_for_port(self.files.port, self.process, START_S)

    def kill(self) -> None:
        """Kill it with -9, whatever it is doing."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def log(self) -> str:
        paths = [self.files.folder / "out", *(self.files.folder / "log").glob("*.log")]
        return "\n".join(path.read_text(errors="replace")[-5000:] for path in paths)


class Balancer:
    """What stands before a cluster: takes connections and passes them to the first node that
    answers, as a load balancer or several addresses of one name would."""

    def __init__(self, ports: tuple[int, ...]) -> None:
        self._ports = ports
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.passed: list[int] = []  # to which port each connection went
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        for port in self._ports:
            with contextlib.suppress(OSError):
                node = socket.create_connection(("127.0.0.1", port), 5.0)
                self.passed.append(port)
                break
        else:
            client.close()
            return
        targets = {client: node, node: client}
        with client, node, contextlib.suppress(OSError):
            while True:
                for end in select.select(list(targets), [], [])[0]:
                    data = end.recv(65536)
                    if not data:
                        return
                    targets[end].sendall(data)
