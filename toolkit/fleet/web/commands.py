"""Has a device do something once, for the page and the API."""

import asyncio

from device.protocol.documents import Command, CommandState
from toolkit.fleet.fleet_folder import Fleet
from toolkit.fleet.server.commands import give, make_command
from toolkit.fleet.store.accounts import Account
from toolkit.fleet.store.database import Database
from toolkit.fleet.web.orders import who
from toolkit.fleet.web.pages.answer import DeviceCommand
from toolkit.fleet.web.store_threads import StoreThreads

WAIT_S = 20.0  # for the device's answer
EXPIRES_S = 60.0


async def run_command(
    store: StoreThreads, fleet: Fleet, account: Account, command: DeviceCommand
) -> CommandState | None:
    """Give a command and wait for its end; None: the device has not answered.

    Raises RolloutError: the device or the operation is not known, the broker is not there.
    """
    signed = await store.write(_make, command, who(account))
    answer = await asyncio.to_thread(give, fleet, signed, wait_s=WAIT_S)
    return answer.state


def _make(database: Database, command: DeviceCommand, by: str) -> Command:
    return make_command(
        database, command.device, command.op, command.words, expires_s=EXPIRES_S, who=by
    )
