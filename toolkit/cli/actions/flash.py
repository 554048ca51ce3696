"""Bring a bundle to the board on the desk."""

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import NoReturn

import click
import msgspec
from rich.console import Console
from rich.table import Table

from device.control.upload_request import BoardFacts
from device.protocol.documents import InstallPolicy
from toolkit.cli.actions.board.care import facts_text
from toolkit.cli.actions.board.search import find_address, search
from toolkit.cli.actions.outputs import print_result
from toolkit.cli.actions.transfer import transfer_lines
from toolkit.cli.commands.flash import Flash
from toolkit.fleet.boards.discovery import FoundBoard, no_boards
from toolkit.fleet.boards.many import INTERRUPTED, BoardResult, ManyFlasher, exit_status
from toolkit.fleet.brokers.address import BrokerAddress, parse_broker
from toolkit.fleet.folder import broker_address, load_settings
from toolkit.fleet.transports.addresses import open_board, parse_address
from toolkit.fleet.transports.delivery import Delivery
from toolkit.fleet.transports.flash_board import flash_board
from toolkit.fleet.transports.transport import Board, Flashed, Progress

STAYS = "the board stays on its old release, and keeps what has arrived"


def flash(options: Flash) -> None:
    """Flash one board or all that are found, or keep a release on trial.

    Raises TandemError, click.UsageError; exits with 130 where it was interrupted.
    """
    bundle, commit = options.bundle, options.commit
    if (bundle is None) != commit or (
        commit and (options.no_commit or options.slot or options.all_found)
    ):
        raise click.UsageError(
            "name the BUNDLE, or --commit alone to keep the one that a board has on trial"
        )
    policy = InstallPolicy(slot=options.slot or "", manual=options.no_commit)
    if options.all_found:
        if options.address is not None or options.devices:
            raise click.UsageError("--all-found takes neither --to nor --device")
        _flash_all(options, policy)
    address = options.address
    if address is None:
        address = find_address(options.search, as_json=options.as_json)
    board = _open(options, address)
    if bundle is None:
        _commit(board, as_json=options.as_json)
        return
    delivery = Delivery(bundle, options.fleet, erase=options.erase_cache, policy=policy)
    with closing(delivery), closing(board):
        result = _flash(board, address, delivery, as_json=options.as_json)
    print_result(result, _sentence(result), as_json=options.as_json)


def _open(options: Flash, to: str) -> Board:
    address = parse_address(to, options.devices)
    if address.text.startswith("mqtt:"):
        broker = _broker(options, address.host, address.port)
        address = replace(address, broker=broker)
    return open_board(replace(address, timeout_s=options.timeout_s))


def _flash(board: Board, address: str, delivery: Delivery, *, as_json: bool) -> Flashed:
    try:
        with transfer_lines(hidden=as_json) as lines:

            def show(state: Progress) -> None:
                lines.show(address, state.phase, state.received_bytes, state.total_bytes)

            def show_facts(facts: BoardFacts) -> None:
                print_result(facts, facts_text(facts, short=True), as_json=as_json)

            return flash_board(board, address, delivery, on_facts=show_facts, on_progress=show)
    except KeyboardInterrupt as stop:
        click.echo(f"stopped: {str(stop) or STAYS}", err=True)
        sys.exit(INTERRUPTED)


def _flash_all(options: Flash, policy: InstallPolicy) -> NoReturn:
    """Flash all found boards; exits with the status of the worst."""
    assert options.bundle is not None
    as_json = options.as_json
    seen = search(options.search, as_json=as_json)
    if not seen.boards:
        raise no_boards(seen)
    try:
        with transfer_lines(hidden=as_json) as lines:

            def show(board: FoundBoard, state: Progress) -> None:
                received, total = state.received_bytes, state.total_bytes
                lines.show(board.address, state.phase, received, total, board.name)

            flasher = ManyFlasher(
                options.bundle,
                options.fleet,
                erase=options.erase_cache,
                policy=policy,
                on_progress=show,
            )
            results = flasher.flash(seen.boards)
    except KeyboardInterrupt:
        click.echo(
            "stopped: boards that were not live yet stay on their old release, and keep what "
            "has arrived",
            err=True,
        )
        sys.exit(INTERRUPTED)
    if as_json:
        click.echo(msgspec.json.encode(results).decode())
    else:
        Console().print(_summary(results))
    sys.exit(exit_status(results))


def _summary(results: Sequence[BoardResult]) -> Table:
    """Return the table of how each board ended."""
    failed = sum(1 for result in results if result.status)
    title = f"{len(results) - failed} of {len(results)} boards run it"
    table = Table("device", "address", "state", "sent", "s", "reason", title=title, box=None)
    for row in results:
        sent = f"{row.sent_bytes / 1e6:.1f} MB"
        table.add_row(row.device, row.address, row.state, sent, f"{row.duration_s:.1f}", row.reason)
    return table


def _commit(board: Board, *, as_json: bool) -> None:
    """Keep the release on trial."""
    with closing(board):
        answer = board.commit()
    print_result(answer, f"{answer.device} keeps the release on trial", as_json=as_json)


def _broker(options: Flash, host: str, port: int | None) -> BrokerAddress:
    """Return the broker of the address; a fleet has the certificates for it."""
    username, password = options.account.username, options.account.password
    text = f"[{host}]" if ":" in host else host
    address = parse_broker(text if port is None else f"{text}:{port}", username, password)
    if options.fleet is None:
        return address
    settings = load_settings(options.fleet).broker
    if (settings.host, settings.port) != (address.host, address.port):
        return address
    return replace(broker_address(options.fleet), username=username, password=password)


def _sentence(result: Flashed) -> str:
    """Return the last line."""
    what = f"{result.name} {result.version}"
    where = result.device or result.address
    if result.phase == "same":
        return f"{where} runs {what} already: nothing was sent"
    sent = f"{result.sent_bytes / 1e6:.1f} of {result.total_bytes / 1e6:.1f} MB sent"
    if result.phase == "written":
        folder = result.address.removeprefix("dir://")
        return (
            f"{what} is in {folder} ({sent}); on the board: `tandem-agent control install {folder}`"
        )
    state = "is live on" if result.phase == "live" else "runs on trial on"
    text = f"{what} {state} {where} after {result.duration_s:.1f} s ({sent})"
    measured = result.measured
    if measured is not None and measured.first_latency_ms:
        text += f", first detections after {measured.first_latency_ms:.1f} ms"
    if measured is not None and measured.latency_p50_ms:
        text += f", {measured.latency_p50_ms:.1f} ms a frame"
    if result.phase == "trial":
        text += "; `tandem flash --commit` keeps it, a restart of the board goes back"
    return text
