"""`tandem board provision`: boards at the line, from a CSV file to a CSV file."""

import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from toolkit.cli.commands.board.init import init_options, packages_from
from toolkit.cli.options.board import ask_password
from toolkit.cli.options.finite import FiniteRange
from toolkit.cli.options.fleet import json_option
from toolkit.fleet.boards.many import INTERRUPTED
from toolkit.fleet.transports.addresses import USB

if TYPE_CHECKING:
    from toolkit.fleet.boards.provision_table import LineResult


@click.command(
    epilog="Example: tandem board provision --csv in.csv --out results.csv --fleet robots "
    "--bundle robot.bundle"
)
@click.option("--csv", "table", required=True, metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Boards, a line each: serial, and if wanted device, address, profile, group, labels "
    "(site=lab;line=2).")  # fmt: skip
@click.option("--out", required=True, metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Results, added a line for each board; those that are ok are skipped.")  # fmt: skip
@click.option("--bundle", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Flash this bundle, too.")  # fmt: skip
@click.option("--to", "address", default=USB, show_default=True, metavar="ADDRESS",
    help="Where boards without an address in their line are.")  # fmt: skip
@click.option("--ssh-config", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Another configuration of ssh.")  # fmt: skip
@click.option("--wait", "wait_s", type=FiniteRange(min=0.0), default=0.0, show_default=True,
    help="Seconds that each board has to come to its address.")  # fmt: skip
@click.option("--retries", type=click.IntRange(0, 10), default=1, show_default=True,
    help="More attempts for a board that fails.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(1, 32), default=1, show_default=True,
    help="Boards at once.")  # fmt: skip
@init_options
@json_option
def provision(
    table: Path,
    out: Path,
    bundle: Path | None,
    address: str,
    ssh_config: Path | None,
    wait_s: float,
    retries: int,
    jobs: int,
    profile: str,
    broker: str,
    fleet: Path | None,
    dev: bool,
    smp_device: str,
    power_mode: str,
    packages: str,
    wheel: Path | None,
    extras: tuple[str, ...],
    user: str,
    overwrite: bool,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Set up and flash the boards of a CSV file; the results go to another one.

    Run it again to go on where it was cut off, and for those that failed. A board whose module has
    another serial number than its line is refused. Exit status 1: a board failed.
    """
    from toolkit.errors import BoardError
    from toolkit.fleet.boards.init import InitSettings
    from toolkit.fleet.boards.provision import Station
    from toolkit.fleet.boards.provision_table import ResultFile, parse_rows, provision_rows
    from toolkit.fleet.boards.request import InitRequest, check_request
    from toolkit.fleet.boards.wheels import own_wheel

    check_request(InitRequest(fleet=fleet, dev=dev))
    try:
        rows = parse_rows(table.read_text(encoding="utf-8-sig"), table.name)
    except (OSError, ValueError) as error:
        raise BoardError(f"cannot read {table}: {error}") from error
    results = ResultFile(out)
    with tempfile.TemporaryDirectory() as work:
        try:
            settings = InitSettings(
                wheel or own_wheel(Path(work)),
                packages_from(packages), extras, user, power_mode, overwrite, timeout_s,
            )  # fmt: skip
            station = Station(
                settings=settings,
                broker=broker,
                fleet=fleet,
                dev=dev,
                smp_device=smp_device,
                profile=profile,
                bundle=bundle,
                default_address=address,
                ssh_config="" if ssh_config is None else str(ssh_config.resolve()),
                wait_s=wait_s,
                ask_password=_AskOnce().ask,
            )
            ended = provision_rows(
                rows,
                results,
                station.provision,
                retries=retries,
                jobs=jobs,
                on_result=(lambda _result: None) if as_json else _say,
            )
        except KeyboardInterrupt:
            click.echo(f"stopped: run it again, it goes on; {out} has what is done", err=True)
            sys.exit(INTERRUPTED)
        finally:
            results.close()
    skipped = len(rows) - len(ended)
    failed = [result for result in ended if result.result != "ok"]
    if as_json:
        click.echo(msgspec.json.encode(_summary(ended, skipped)).decode())
    else:
        click.echo(
            f"{len(ended) - len(failed)} boards ok, {len(failed)} failed, {skipped} were ok before"
        )
    sys.exit(1 if failed else 0)


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


def _say(result: "LineResult") -> None:
    row = result.row
    text = result.provisioned.bundle or "set up"
    detail = text if result.result == "ok" else result.reason
    click.echo(f"{row.device:<16} {result.result:<7} {result.duration_s:6.1f} s  {detail}")


def _summary(ended: "Sequence[LineResult]", skipped: int) -> dict[str, object]:
    from toolkit.fleet.boards.provision_table import OUTPUT

    rows = [dict(zip(OUTPUT, result.cells(), strict=True)) for result in ended]
    failed = sum(1 for result in ended if result.result != "ok")
    return {"ok": len(ended) - failed, "failed": failed, "skipped": skipped, "boards": rows}
