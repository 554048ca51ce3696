"""Look after one board: what it is, its log, a shell, its power mode."""

import sys
from contextlib import closing

from device.control.upload_request import BoardFacts
from device.protocol.documents import Reported
from toolkit.cli.actions.board.shell import open_shell, ssh_address
from toolkit.cli.actions.outputs import print_result
from toolkit.cli.commands.board import Info, Logs, PowerMode, Reboot, Shell
from toolkit.fleet.boards.care import log_script, may_read_journal, reboot_board, wait_for_boot
from toolkit.fleet.boards.many import INTERRUPTED
from toolkit.fleet.boards.power import current_mode, list_modes, set_mode
from toolkit.fleet.boards.shell import interactive, replace_process
from toolkit.fleet.transports.addresses import open_board, parse_address
from toolkit.fleet.transports.transport import TransportError


def info(options: Info) -> None:
    """Print what a board is and runs. Raises TandemError."""
    with closing(open_board(parse_address(options.address))) as board:
        facts = board.facts()
    if facts is None:
        raise TransportError(
            f"{options.address}: nobody answers there who could say what the board is"
        )
    print_result(facts, facts_text(facts), as_json=options.as_json)


def facts_text(board: BoardFacts, *, short: bool = False) -> str:
    """Return what a board is and runs, a line each; `short`: as a flash begins."""
    facts, answer = board.facts, board.answer
    reported = answer.reported
    rows = [
        ("device", answer.device),
        ("profile", "" if reported is None else reported.profile),
        ("module", facts.module),
        ("JetPack", facts.jetpack),
        ("TensorRT", facts.tensorrt),
        ("DLA cores", str(facts.dla_cores or "")),
    ]
    if not short:
        memory = f"{facts.memory_mb} MB" if facts.memory_mb else ""
        rows += [("power mode", facts.power_mode), ("memory", memory)]
    rows.append(("free space", f"{facts.free_mb} MiB" if facts.free_mb else ""))
    rows += [(f"slot {row.slot}", f"{row.name} {row.version}, {row.role}") for row in answer.slots]
    if reported is not None:
        rows += [] if short else _running(reported)
        rows += [("warning", reported.warning)] if reported.dev else []
    return "\n".join(f"{name:<11} {text or 'not known'}" for name, text in rows)


def _running(reported: Reported) -> list[tuple[str, str]]:
    running = reported.running
    text = "nothing" if running is None else f"{running.name} {running.version}"
    rows = [
        ("runs", text),
        ("pipeline", " ".join(filter(None, (reported.pipeline.status, reported.pipeline.reason)))),
        ("update", " ".join(filter(None, (reported.update.phase, reported.update.reason)))),
        ("agent", reported.agent),
    ]
    if reported.measured is not None and reported.measured.latency_p50_ms:
        rows.append(("latency", f"{reported.measured.latency_p50_ms:.1f} ms a frame"))
    return rows


def logs(options: Logs) -> None:
    """Print the log of a board; exits as journalctl does. Raises TandemError."""
    script = log_script(
        lines=options.lines,
        follow=options.follow,
        as_json=options.as_json,
        since=options.since,
        level=options.level or "",
    )
    with open_shell(options.address) as board:
        try:
            sys.exit(board.follow(script, root=not may_read_journal(board)))
        except KeyboardInterrupt:  # how --follow ends
            sys.exit(INTERRUPTED)


def shell(options: Shell) -> None:
    """Replace this process by a login on the board."""
    replace_process(interactive(ssh_address(options.address)))


def reboot(options: Reboot) -> None:
    """Start a board again, and wait for its agent. Raises TandemError."""
    with open_shell(options.address) as board:
        boot = reboot_board(board)
        if options.no_wait:
            row = {"board": board.name, "back": None}
            print_result(row, f"{board.name} goes down", as_json=options.as_json)
            return
        waited_s = wait_for_boot(board, boot, open_board(board.address).facts, options.timeout_s)
        sentence = f"{board.name} is back after {waited_s:.0f} s, and its agent answers"
        answer = {"board": board.name, "back_s": round(waited_s, 1)}
        print_result(answer, sentence, as_json=options.as_json)


def power_mode(options: PowerMode) -> None:
    """Set or list the power modes of a board. Raises TandemError."""
    with open_shell(options.address) as board:
        if options.mode is not None:
            mode = set_mode(board, options.mode, reboot=options.with_reboot)
            row: object = {"board": board.name, "mode": mode.name}
            print_result(row, f"{board.name}: {mode.name}", as_json=options.as_json)
            return
        current, modes = current_mode(board), list_modes(board)
        names = [each.name for each in modes]
        row = {"board": board.name, "mode": current and current.name, "modes": names}
        text = "\n".join(f"{'*' if each == current else ' '} {each.name}" for each in modes)
        print_result(row, text or f"{board.name} has no nvpmodel", as_json=options.as_json)
