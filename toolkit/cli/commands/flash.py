"""`tandem flash`: bring a bundle to the board on the desk."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from device.control.upload_request import BoardFacts
from device.protocol.documents import InstallPolicy
from toolkit.cli.commands.flash_all import flash_all
from toolkit.cli.failures import JsonErrors
from toolkit.cli.log import progress_shown
from toolkit.cli.options.finite import FiniteRange
from toolkit.cli.options.search import found_way, search_of, search_options
from toolkit.cli.phases import phase_text
from toolkit.fleet.boards.many import INTERRUPTED
from toolkit.fleet.brokers.address import BrokerAddress, parse_broker
from toolkit.fleet.transports.addresses import open_board, parse_address
from toolkit.fleet.transports.deliver import flash_board
from toolkit.fleet.transports.delivery import Delivery
from toolkit.fleet.transports.transport import Board, Flashed, Progress

STAYS = "the board stays on its old release, and keeps what has arrived"
EPILOG = "Example: tandem flash robot.bundle --to ssh://robot@192.168.55.1 --fleet robots/"


@click.command(cls=JsonErrors, epilog=EPILOG)
@click.argument(
    "bundle", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--to",
    "way",
    metavar="WAY",
    help="ssh://user@host, serial:///dev/ttyACM0?baud=921600, smp+udp://host, dir:///media/usb or "
    "mqtt://broker/device-id; by default the board that is found.",
)
@click.option("--all-found", is_flag=True, help="Flash every board that is found, all at once.")
@search_options
@click.option(
    "--device",
    "devices",
    multiple=True,
    metavar="ID",
    help="Who shall take a signed release from dir://. Repeatable.",
)
@click.option(
    "--fleet",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Sign with the keys of this fleet's folder; publishes the bundle there.",
)
@click.option("--erase-cache", is_flag=True, help="Forget what an earlier transfer has left.")
@click.option(
    "--slot", type=click.Choice(("a", "b")), help="Refuse unless this slot is the idle one."
)
@click.option(
    "--no-commit",
    is_flag=True,
    help="Leave the release on trial: `tandem flash --commit` keeps it, a restart goes back.",
)
@click.option("--commit", is_flag=True, help="Keep the release on trial; takes no BUNDLE.")
@click.option("--username", help="User name for the broker of mqtt://.")
@click.option(
    "--password",
    envvar="TANDEM_MQTT_PASSWORD",
    show_envvar=True,
    help="Password for the broker; prefer the environment variable.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=0.1),
    default=120.0,
    show_default=True,
    help="Give a device behind mqtt:// up when it is silent for this many seconds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the board and the result as JSON.")
def flash(
    bundle: Path | None,
    way: str | None,
    all_found: bool,
    login: str,
    ssh_config: Path | None,
    devices: tuple[str, ...],
    fleet: Path | None,
    erase_cache: bool,
    slot: Literal["a", "b"] | None,
    no_commit: bool,
    commit: bool,
    username: str | None,
    password: str | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Bring BUNDLE to one board and wait until it is live there.

    Without --to it is looked for: on the USB network, by mDNS, at serial ports. Where there are
    several, they are listed and none is flashed; with --all-found each is.
    Only the chunks that the board lacks are sent. Ctrl-C leaves the board on its old release; what
    has arrived stays, and the next flash goes on there. Exit status 0: live, or it was already; 1:
    the board cannot be reached; 3: it refuses the bundle; 4: it rolled it back; 130: Ctrl-C.
    """
    if (bundle is None) != commit or (commit and (no_commit or slot or all_found)):
        raise click.UsageError(
            "name the BUNDLE, or --commit alone to keep the one that a board has on trial"
        )
    policy = InstallPolicy(slot=slot or "", manual=no_commit)
    if all_found:
        if way is not None or devices:
            raise click.UsageError("--all-found takes neither --to nor --device")
        assert bundle is not None
        options = search_of(login, ssh_config)
        flash_all(bundle, fleet, options, erase=erase_cache, policy=policy, as_json=as_json)
        return
    if way is None:
        way = found_way(search_of(login, ssh_config), as_json=as_json)
    address = parse_address(way, devices)
    if address.text.startswith("mqtt:"):
        broker = _broker(address.host, address.port, fleet, username, password)
        address = replace(address, broker=broker)
    board = open_board(replace(address, timeout_s=timeout_s))
    if bundle is None:
        _commit(board, as_json=as_json)
        return
    delivery = Delivery(bundle, fleet, erase=erase_cache, policy=policy)
    with Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        disable=as_json or not progress_shown(),
    ) as bars:
        try:
            result = flash_board(
                board,
                way,
                delivery,
                on_facts=_say_facts_json if as_json else _say_facts,
                on_progress=_shower(bars),
            )
        except KeyboardInterrupt as stop:
            bars.stop()
            click.echo(f"stopped: {str(stop) or STAYS}", err=True)
            sys.exit(INTERRUPTED)
        finally:
            board.close()
            delivery.close()
    click.echo(msgspec.json.encode(result).decode() if as_json else _sentence(result))


def _commit(board: Board, *, as_json: bool) -> None:
    """Keep the release on trial."""
    try:
        answer = board.commit()
    finally:
        board.close()
    if as_json:
        click.echo(msgspec.json.encode(answer).decode())
    else:
        click.echo(f"{answer.device} keeps the release on trial")


def _broker(
    host: str, port: int | None, fleet: Path | None, username: str | None, password: str | None
) -> BrokerAddress:
    """Return the broker of the address; a fleet has the certificates for it."""
    text = f"[{host}]" if ":" in host else host
    address = parse_broker(text if port is None else f"{text}:{port}", username, password)
    if fleet is None:
        return address
    from toolkit.fleet.folder import broker_address, load_settings

    settings = load_settings(fleet).broker
    if (settings.host, settings.port) != (address.host, address.port):
        return address
    return replace(broker_address(fleet), username=username, password=password)


def _say_facts(board: BoardFacts) -> None:
    """Print what the board is, and what it runs."""
    facts, answer = board.facts, board.answer
    reported = answer.reported
    rows = [
        ("device", answer.device),
        ("profile", "" if reported is None else reported.profile),
        ("module", facts.module),
        ("JetPack", facts.jetpack),
        ("TensorRT", facts.tensorrt),
        ("DLA cores", str(facts.dla_cores or "")),
        ("free space", f"{facts.free_mb} MiB" if facts.free_mb else ""),
        *((f"slot {row.slot}", f"{row.name} {row.version}, {row.role}") for row in answer.slots),
    ]
    if reported is not None and reported.dev:
        rows.append(("warning", reported.warning))
    for name, text in rows:
        click.echo(f"{name:<11} {text or 'not known'}")


def _say_facts_json(board: BoardFacts) -> None:
    click.echo(msgspec.json.encode(board).decode())


def _shower(bars: Bars) -> Callable[[Progress], None]:
    """Return what shows the progress of the one board."""
    task = bars.add_task("", total=None, visible=False)

    def show(state: Progress) -> None:
        bars.update(
            task,
            description=phase_text(state.phase),
            completed=state.received_bytes,
            total=state.total_bytes,
            visible=True,
        )

    return show


def _sentence(result: Flashed) -> str:
    """Return the last line."""
    what = f"{result.name} {result.version}"
    where = result.device or result.way
    if result.phase == "same":
        return f"{where} runs {what} already: nothing was sent"
    sent = f"{result.sent_bytes / 1e6:.1f} of {result.total_bytes / 1e6:.1f} MB sent"
    if result.phase == "written":
        folder = result.way.removeprefix("dir://")
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
