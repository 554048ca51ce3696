"""`tandem board info|logs|shell|reboot|power-mode`: looking after one board."""

import sys

import click
import msgspec

from device.control.upload_request import BoardFacts
from toolkit.cli.options.board import address_argument, open_shell, ssh_address
from toolkit.cli.options.finite import FiniteRange
from toolkit.cli.options.fleet import json_option
from toolkit.fleet.boards.many import INTERRUPTED
from toolkit.fleet.transports.addresses import USB, open_board, parse_address
from toolkit.fleet.transports.transport import TransportError

LEVELS = ("err", "warning", "info", "debug")


@click.command(epilog="Example: tandem board info ssh://robot@192.168.55.1 --json")
@click.argument("address", default=USB, metavar="[ADDRESS]")
@json_option
def info(address: str, as_json: bool) -> None:
    """Say what the board at ADDRESS is and what it runs; any way of `tandem flash --to` will do."""
    board = open_board(parse_address(address))
    try:
        facts = board.facts()
    finally:
        board.close()
    if facts is None:
        raise TransportError(f"{address}: nobody answers there who could say what the board is")
    if as_json:
        click.echo(msgspec.json.encode(facts).decode())
        return
    for name, text in info_rows(facts):
        click.echo(f"{name:<11} {text or 'not known'}")


def info_rows(board: BoardFacts) -> list[tuple[str, str]]:
    """Return what a board is and runs, as names and texts; "" for what is not known."""
    facts, answer = board.facts, board.answer
    reported = answer.reported
    rows = [
        ("device", answer.device),
        ("profile", "" if reported is None else reported.profile),
        ("module", facts.module),
        ("JetPack", facts.jetpack),
        ("TensorRT", facts.tensorrt),
        ("DLA cores", str(facts.dla_cores or "")),
        ("power mode", facts.power_mode),
        ("memory", f"{facts.memory_mb} MB" if facts.memory_mb else ""),
        ("free space", f"{facts.free_mb} MiB" if facts.free_mb else ""),
        *((f"slot {row.slot}", f"{row.name} {row.version}, {row.role}") for row in answer.slots),
    ]
    if reported is None:
        return rows
    running = reported.running
    text = "nothing" if running is None else f"{running.name} {running.version}"
    rows += [
        ("runs", text),
        ("pipeline", " ".join(filter(None, (reported.pipeline.status, reported.pipeline.reason)))),
        ("update", " ".join(filter(None, (reported.update.phase, reported.update.reason)))),
        ("agent", reported.agent),
    ]
    if reported.measured is not None and reported.measured.latency_p50_ms:
        rows.append(("latency", f"{reported.measured.latency_p50_ms:.1f} ms a frame"))
    if reported.dev:
        rows.append(("warning", reported.warning))
    return rows


@click.command(epilog="Example: tandem board logs -f ssh://robot@192.168.55.1")
@address_argument
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=100, show_default=True,
    help="The newest lines, so many.")  # fmt: skip
@click.option("--since", default="", metavar="TIME", help="As journalctl has it: today, -1h.")
@click.option("--level", type=click.Choice(LEVELS), help="Only lines of this level or above.")
@click.option("--json", "as_json", is_flag=True, help="Print the journal's JSON, one a line.")
def logs(
    address: str, follow: bool, lines: int, since: str, level: str | None, as_json: bool
) -> None:
    """Print the log of the agent and its pipelines."""
    from toolkit.fleet.boards.care import log_script, may_read_journal

    script = log_script(lines=lines, follow=follow, as_json=as_json, since=since, level=level or "")
    with open_shell(address) as board:
        try:
            sys.exit(board.follow(script, root=not may_read_journal(board)))
        except KeyboardInterrupt:  # how --follow ends
            sys.exit(INTERRUPTED)


@click.command(epilog="Example: tandem board shell ssh://robot@192.168.55.1")
@address_argument
def shell(address: str) -> None:
    """Log in to the board, with the terminal."""
    from toolkit.fleet.boards.shell import interactive, replace_process

    replace_process(interactive(ssh_address(address)))


@click.command(epilog="Example: tandem board reboot ssh://robot@192.168.55.1 --timeout 120")
@address_argument
@click.option("--no-wait", is_flag=True, help="Do not wait until the board is back.")
@click.option("--timeout", "timeout_s", type=FiniteRange(min=1.0), default=300.0, show_default=True,
    help="Seconds until it has to be back.")  # fmt: skip
@json_option
def reboot(address: str, no_wait: bool, timeout_s: float, as_json: bool) -> None:
    """Start the board again, and wait until its agent answers."""
    from toolkit.fleet.boards.care import reboot_board, wait_for_boot

    with open_shell(address) as board:
        boot = reboot_board(board)
        if no_wait:
            _say({"board": board.name, "back": None}, f"{board.name} goes down", as_json)
            return
        waited_s = wait_for_boot(board, boot, open_board(board.address).facts, timeout_s)
        sentence = f"{board.name} is back after {waited_s:.0f} s, and its agent answers"
        _say({"board": board.name, "back_s": round(waited_s, 1)}, sentence, as_json)


@click.command("power-mode", epilog="Example: tandem board power-mode MAXN")
@click.argument("mode", required=False)
@click.option("--to", "address", default=USB, show_default=True, metavar="ADDRESS",
    help="ssh://user@host of the board.")  # fmt: skip
@click.option("--reboot", "with_reboot", is_flag=True,
    help="Let the board start again if the mode needs that.")  # fmt: skip
@json_option
def power_mode(mode: str | None, address: str, with_reboot: bool, as_json: bool) -> None:
    """Set the power mode to MODE, a name or number of nvpmodel; without it, list them."""
    from toolkit.fleet.boards.power import current_mode, list_modes, set_mode

    with open_shell(address) as board:
        if mode is not None:
            taken = set_mode(board, mode, reboot=with_reboot)
            sentence = f"{board.name}: {taken.name}"
            _say({"board": board.name, "mode": taken.name}, sentence, as_json)
            return
        current, modes = current_mode(board), list_modes(board)
        names = [each.name for each in modes]
        row = {"board": board.name, "mode": current and current.name, "modes": names}
        text = "\n".join(f"{'*' if each == current else ' '} {each.name}" for each in modes)
        _say(row, text or f"{board.name} has no nvpmodel", as_json)


def _say(row: object, sentence: str, as_json: bool) -> None:
    click.echo(msgspec.json.encode(row).decode() if as_json else sentence)
