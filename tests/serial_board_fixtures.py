"""What a board at a serial line reports: the roles of its slots."""

import time
from collections.abc import Callable

from control_fixtures import client_of
from mqtt_fixtures import WAIT_S, AgentBox

from device.protocol.control import AskProgress


def roles(box: AgentBox) -> dict[str, str]:
    client = client_of(box)
    answer = client.ask(AskProgress())
    client.close()
    return {row.version: row.role for row in answer.slots}


def wait_for(holds: Callable[[], bool], box: AgentBox) -> None:
    until_s = time.monotonic() + 2 * WAIT_S
    while not holds():
        assert time.monotonic() < until_s, box.log()
        time.sleep(0.1)
