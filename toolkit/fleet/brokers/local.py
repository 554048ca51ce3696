"""An MQTT broker in a child process, for demos and first steps: amqtt on 127.0.0.1.

It speaks MQTT 3.1.1 and stores nothing on disk. Use mosquitto for a fleet.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import random
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass

from device.closing import Closing
from device.errors import BrokerError
from device.start.command import module_command

HOST = "127.0.0.1"
MODULE = "toolkit.fleet.brokers.local"
DEFAULT_PORT = 1883
SERVER_PORTS = (20_000, 32_000)  # that a server may take on its own
FREE_PORT_TRIES = 1000
_READY = "listening"
_TERM_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class BrokerProcess(Closing):
    """A broker that accepts connections; leaving the `with` block ends it."""

    host: str
    port: int
    process: "subprocess.Popen[str]"

    def close(self) -> None:
        """End the broker."""
        self.process.terminate()
        try:
            self.process.wait(_TERM_WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_TERM_WAIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def start_broker(port: int = 0) -> BrokerProcess:
    """Start a broker and wait until it accepts connections; port 0 picks a free one.

    BrokerError if the port is in use. The broker ends with this process, however that ends.
    """
    chosen = port or free_port()
    process = subprocess.Popen(
        module_command(MODULE, "--port", str(chosen), "--until-stdin-closes"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    broker = BrokerProcess(HOST, chosen, process)
    line = process.stdout.readline().strip()
    if line != _READY:
        broker.close()
        raise BrokerError(line or f"the broker on {HOST}:{chosen} ended before it was ready")
    return broker


def free_port() -> int:
    """Return a TCP port that is free now.

    It is none of those that systems give to clients (from 32768 on Linux), so no connection that
    begins meanwhile takes it.
    """
    chance = random.SystemRandom()
    for _ in range(FREE_PORT_TRIES):
        port = chance.randrange(*SERVER_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise BrokerError(f"no TCP port of {HOST} from {SERVER_PORTS[0]} on is free")


def port_in_use(port: int) -> str:
    """Return the message for a port in use."""
    return (
        f"port {port} on {HOST} is in use: take the broker that runs there (`tandem deploy "
        f"--broker {HOST}:{port}`), or start one on a free port, for example {free_port()}"
    )


async def _serve(port: int) -> None:
    from amqtt.broker import Broker
    from amqtt.errors import BrokerError as AmqttError

    broker = Broker(
        {
            "listeners": {"default": {"type": "tcp", "bind": f"{HOST}:{port}"}},
            "plugins": {
                "amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}
            },
        }
    )
    try:
        await broker.start()
    except AmqttError as error:
        raise BrokerError(f"cannot start a broker on {HOST}:{port}: {error}") from error
    print(_READY, flush=True)
    await asyncio.Event().wait()


def _check_port(port: int) -> None:
    """Refuse a port in use before amqtt logs a traceback about it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise BrokerError(port_in_use(port)) from error


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)  # nothing is stored, so there is nothing to clean up


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="default: 1883")
    parser.add_argument("--until-stdin-closes", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Run a broker in this process until SIGTERM or Ctrl-C."""
    arguments = make_parser().parse_args()
    # amqtt logs each client; tandem shows its own lines.
    logging.basicConfig(level=logging.CRITICAL)
    if arguments.until_stdin_closes:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        _check_port(arguments.port)
        asyncio.run(_serve(arguments.port))
    except BrokerError as error:
        print(error, flush=True)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
