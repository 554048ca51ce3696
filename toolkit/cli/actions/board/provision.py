"""Set up and flash many boards, from a CSV file to a CSV file."""

import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import click

from toolkit.cli.actions.board.init import init_settings
from toolkit.cli.actions.board.shell import ask_password
from toolkit.cli.actions.outputs import print_result
from toolkit.cli.commands.board import Provision
from toolkit.errors import BoardError
from toolkit.fleet.boards.many import INTERRUPTED
from toolkit.fleet.boards.provision import Station
from toolkit.fleet.boards.provision_table import (
    OUTPUT,
    LineResult,
    LineRow,
    ResultFile,
    parse_rows,
    provision_rows,
)
from toolkit.fleet.boards.request import InitRequest, check_request
from toolkit.fleet.boards.wheels import own_wheel


def provision(options: Provision) -> None:
    """Provision the boards of a CSV file; exits with 1 if one failed.

    Raises TandemError, click.UsageError.
    """
    check_request(InitRequest(fleet=options.setup.fleet, dev=options.setup.dev))
    rows = _rows(options.table)
    with closing(ResultFile(options.out)) as results, tempfile.TemporaryDirectory() as work:
        try:
            ended = provision_rows(
                rows,
                results,
                _station(options, Path(work)).provision,
                retries=options.retries,
                jobs=options.jobs,
                on_result=(lambda _result: None) if options.as_json else _say,
            )
        except KeyboardInterrupt:
            click.echo(
                f"stopped: run it again, it goes on; {options.out} has what is done", err=True
            )
            sys.exit(INTERRUPTED)
    skipped = len(rows) - len(ended)
    failed = [result for result in ended if result.result != "ok"]
    text = f"{len(ended) - len(failed)} boards ok, {len(failed)} failed, {skipped} were ok before"
    print_result(_summary(ended, skipped), text, as_json=options.as_json)
    sys.exit(1 if failed else 0)


def _rows(table: Path) -> Sequence[LineRow]:
    try:
        return parse_rows(table.read_text(encoding="utf-8-sig"), table.name)
    except (OSError, ValueError) as error:
        raise BoardError(f"cannot read {table}: {error}") from error


def _station(options: Provision, work: Path) -> Station:
    setup = options.setup
    return Station(
        settings=init_settings(setup, setup.wheel or own_wheel(work)),
        broker=setup.broker,
        fleet=setup.fleet,
        dev=setup.dev,
        smp_device=setup.smp_device,
        profile=setup.profile,
        bundle=options.bundle,
        default_address=options.address,
        ssh_config="" if options.ssh_config is None else str(options.ssh_config.resolve()),
        wait_s=options.wait_s,
        ask_password=_AskOnce().ask,
    )


class _AskOnce:
    """The password of sudo is the same on all boards of a line: it is asked for once, and again
    where a board does not take it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._password: str | None = None

    def ask(self, login: str, refused: str | None = None) -> str:
        """Return it; who comes while it is asked for waits."""
        with self._lock:
            # A board that was refused the one before takes what was typed meanwhile.
            if self._password is None or self._password == refused:
                self._password = ask_password(login, refused)
            return self._password


def _say(result: LineResult) -> None:
    row = result.row
    text = result.provisioned.bundle or "set up"
    detail = text if result.result == "ok" else result.reason
    click.echo(f"{row.device:<16} {result.result:<7} {result.duration_s:6.1f} s  {detail}")


def _summary(ended: Sequence[LineResult], skipped: int) -> dict[str, object]:
    rows = [dict(zip(OUTPUT, result.cells(), strict=True)) for result in ended]
    failed = sum(1 for result in ended if result.result != "ok")
    return {"ok": len(ended) - failed, "failed": failed, "skipped": skipped, "boards": rows}
