"""`tandem board`: set a board up, look after it, provision many."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolkit.cli.command import (
    FILE,
    FOLDER,
    NEW_FILE,
    argument,
    command,
    group,
    json_option,
    option,
    part,
)
from toolkit.cli.failures import JsonErrorsGroup
from toolkit.cli.options.choices import USB
from toolkit.cli.options.fleet import BoardLogin


@dataclass(frozen=True, slots=True)
class Find:
    """Look for boards: on the USB network, by mDNS, at serial ports.

    Exit status 1: there is none.

    Example: tandem board find --login robot --json
    """

    search: BoardLogin = part()
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class SetupOptions:
    """What `init` and `provision` give a board."""

    profile: str = option(
        "The board's profile; by default the one with its part number.", default="", metavar="NAME"
    )
    broker: str = option(
        "The broker; by default the one of fleet.toml.", default="", metavar="HOST[:PORT]"
    )
    fleet: Path | None = option(
        "The fleet's folder: its trust goes to the board, its CA certifies the board's key.",
        type=FOLDER,
    )
    dev: bool = option("A bench: take releases that nobody signed.")
    smp_device: str = option(
        "Take releases over this line of the board too: /dev/ttyGS0 is its USB.",
        "--serial", default="", metavar="TTY",
    )  # fmt: skip
    power_mode: str = option(
        "Set nvpmodel's mode, by name or number; by default it is kept.",
        default="", metavar="MODE",
    )  # fmt: skip
    packages: str = option(
        "Who downloads what the board lacks: this host, which sends it; the board; or nobody, and "
        "it is in this folder of wheels.", default="host", metavar="host|board|DIR",
    )  # fmt: skip
    wheel: Path | None = option(
        "Tandem's wheel; by default it is built of the checkout.", type=FILE
    )
    extras: tuple[str, ...] = option(
        "Extras of tandem-edge, such as portable (onnxruntime). Repeatable.",
        "--extra", default=("fleet", "serial"), metavar="NAME",
    )  # fmt: skip
    user: str = option("As whom the agent runs; made if there is none.", default="tandem")
    overwrite: bool = option("Replace an agent.toml that was changed on the board.")
    timeout_s: float = option(
        "Seconds until the agent has to answer.", "--timeout", min=1.0, default=60.0
    )


@dataclass(frozen=True, slots=True)
class Init:
    """Install the agent on a board over SSH, give it an identity, start it, wait for its answer.

    It gets a Python environment of its own beside JetPack's packages; OpenCV, NumPy and TensorRT
    of the system stay as they are, which is compared at the end. Steps that are done already are
    left alone: run it again after a fault, or for a newer Tandem. sudo's password is asked for
    once, or taken from TANDEM_SUDO_PASSWORD. Exit status 1: a step failed; those before it stay.

    Example: tandem board init ssh://robot@192.168.55.1 --fleet robots
    """

    address: str = argument("ssh://USER@HOST")
    device: str = option("By default the board's host name.", default="", metavar="ID")
    labels: tuple[str, ...] = option(
        "What rollouts may choose the board by. Repeatable.", "--label", metavar="KEY=VALUE"
    )
    setup: SetupOptions = part()
    dry_run: bool = option("Only say what would be done.")
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class Info:
    """Say what the board at ADDRESS is and what it runs, at any address of `tandem flash --to`.

    Example: tandem board info ssh://robot@192.168.55.1 --json
    """

    address: str = argument("[ADDRESS]", default=USB)
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class Logs:
    """Print the log of the agent and its pipelines.

    Example: tandem board logs -f ssh://robot@192.168.55.1
    """

    address: str = argument("[ssh://USER@HOST]", default=USB)
    follow: bool = option("Go on with what comes, until Ctrl-C.", "-f", "--follow")
    lines: int = option("Number of lines, the newest.", "-n", "--lines", min=0, default=100)
    since: str = option("As journalctl has it: today, -1h.", default="", metavar="TIME")
    level: Literal["err", "warning", "info", "debug"] | None = option(
        "Only lines of this level or above."
    )
    as_json: bool = json_option("Print the journal's JSON, one a line.")


@dataclass(frozen=True, slots=True)
class Shell:
    """Log in to the board, with the terminal.

    Example: tandem board shell ssh://robot@192.168.55.1
    """

    address: str = argument("[ssh://USER@HOST]", default=USB)


@dataclass(frozen=True, slots=True)
class Reboot:
    """Start the board again, and wait until its agent answers.

    Example: tandem board reboot ssh://robot@192.168.55.1 --timeout 120
    """

    address: str = argument("[ssh://USER@HOST]", default=USB)
    no_wait: bool = option("Do not wait until the board is back.")
    timeout_s: float = option(
        "Seconds until it has to be back.", "--timeout", min=1.0, default=300.0
    )
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class PowerMode:
    """Set the power mode to MODE, a name or number of nvpmodel; without it, list them.

    Example: tandem board power-mode MAXN
    """

    mode: str | None = argument(required=False)
    address: str = option("ssh://user@host of the board.", "--to", default=USB, metavar="ADDRESS")
    with_reboot: bool = option("Let the board start again if the mode needs that.", "--reboot")
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class Provision:
    """Set up and flash the boards of a CSV file; the results go to another one.

    Run it again to go on where it was cut off, and for those that failed. A board whose module has
    another serial number than its line is refused. Exit status 1: a board failed.

    Example: tandem board provision --csv in.csv --out results.csv --fleet robots --bundle
    robot.bundle
    """

    table: Path = option(
        "Boards, a line each: serial, and if wanted device, address, profile, group, labels "
        "(site=lab;line=2).", "--csv", required=True, type=FILE, metavar="FILE",
    )  # fmt: skip
    out: Path = option(
        "Results, added a line for each board; those that are ok are skipped.",
        required=True, type=NEW_FILE, metavar="FILE",
    )  # fmt: skip
    bundle: Path | None = option("Flash this bundle, too.", type=FILE)
    address: str = option(
        "Where boards without an address in their line are.",
        "--to", default=USB, metavar="ADDRESS",
    )  # fmt: skip
    ssh_config: Path | None = option("Another configuration of ssh.", type=FILE)
    wait_s: float = option(
        "Seconds that each board has to come to its address.", "--wait", min=0.0, default=0.0
    )
    retries: int = option("More attempts for a board that fails.", min=0, max=10, default=1)
    jobs: int = option("Boards at once.", min=1, max=32, default=1)
    setup: SetupOptions = part()
    as_json: bool = json_option("Print JSON.")


board = group(
    "board",
    """Set a board up over SSH, look after it, and provision many at once.

    \b
    Examples:
      tandem board init ssh://robot@192.168.55.1 --device board-1 --fleet robots
      tandem board find
      tandem board info ssh://robot@192.168.55.1
      tandem board logs -f ssh://robot@192.168.55.1
    """,
    (
        command(Find, "board.search:find"),
        command(Init, "board.init:init"),
        command(Info, "board.care:info"),
        command(Logs, "board.care:logs"),
        command(Shell, "board.care:shell"),
        command(Reboot, "board.care:reboot"),
        command(PowerMode, "board.care:power_mode", name="power-mode"),
        command(Provision, "board.provision:provision"),
    ),
    JsonErrorsGroup,
)  # fmt: skip
