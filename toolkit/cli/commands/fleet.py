"""`tandem fleet`: sign releases, enrol devices, roll releases out."""

from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import click

from toolkit.cli.command import (
    FILE,
    NEW_FILE,
    NEW_FOLDER,
    argument,
    command,
    group,
    json_option,
    option,
    part,
)
from toolkit.cli.commands.fleet_devices import Devices, RunKit, device, query
from toolkit.cli.commands.fleet_rollout import Rollback, rollout
from toolkit.cli.options.fleet import RegistryOptions, fleet_option

OTLP = "Send metrics to this OpenTelemetry collector (OTLP over HTTP)."


@dataclass(frozen=True, slots=True)
class Init:
    """Make FOLDER: keys, a repository without releases, certificates, the broker's configuration,
    and what every board gets.

    FOLDER/keys is encrypted with the passphrase in TANDEM_FLEET_PASSPHRASE, if there is one. Copy
    FOLDER/trust to each board, and keep FOLDER/keys to yourself.

    Example: tandem fleet init fleet --root-keys 3 --threshold 2
    """

    folder: Path = argument(type=NEW_FOLDER)
    name: str | None = option("The fleet's name.  [default: that of the folder]")
    root_keys: int = option(
        "How many root keys there are; they sign all other keys.", min=1, max=16, default=1
    )
    threshold: int = option("How many of the root keys must sign.", min=1, max=16, default=1)
    broker: str | None = option(
        "The software of the fleet's MQTT broker, where devices find it, or both: rabbitmq, "
        "192.168.1.10:8883, rabbitmq@192.168.1.10.  [default: mosquitto@127.0.0.1:8883]",
        metavar="[mosquitto|rabbitmq|nats][@]HOST:PORT",
    )
    hosts: tuple[str, ...] = option(
        "Another name or address of the broker, for its certificate; repeatable.",
        "--host", metavar="NAME",
    )  # fmt: skip
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class Issue:
    """Make key and certificate of DEVICE here, for benches; -o is the folder to copy to the board.

    Better let a board enrol itself (`tandem fleet identity expect`): its key never leaves it then.

    Example: tandem fleet identity issue board-1 --fleet fleet -o board-1/
    """

    device: str = argument()
    output: Path = option(None, "-o", "--output", type=NEW_FOLDER, required=True)
    folder: Path = fleet_option()
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class Expect:
    """Let each DEVICE enrol itself, once, with `tandem-agent enrol` and the claim certificate.

    Of a revoked one what is open at the broker is ended first; its old certificate stays refused.

    Example: tandem fleet identity expect board-1 board-2 --fleet fleet
    """

    devices: tuple[str, ...] = argument("DEVICE...", nargs=-1, required=False)
    list_file: IO[str] | None = option(
        "More ids, one a line; - for stdin.", "--list", type=click.File("r"), metavar="FILE"
    )
    folder: Path = fleet_option()
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class Revoke:
    """Shut DEVICE out of the broker and end its connections: it was lost, stolen or retired.

    Example: tandem fleet identity revoke board-1 --fleet fleet
    """

    device: str = argument()
    folder: Path = fleet_option()
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class ListDevices:
    """List the devices: expected, enrolled (until when) or revoked.

    Example: tandem fleet identity list --fleet fleet
    """

    folder: Path = fleet_option()
    as_json: bool = json_option("Print JSON.")


identity = group(
    "identity",
    """Issue, expect, list and revoke the certificates of devices.

    Example: tandem fleet identity expect board-1 board-2 --fleet fleet
    """,
    (
        command(Issue, "fleet.identity:issue"),
        command(Expect, "fleet.identity:expect"),
        command(Revoke, "fleet.identity:revoke"),
        command(ListDevices, "fleet.identity:list_devices", name="list"),
    ),
)


@dataclass(frozen=True, slots=True)
class Rotate:
    """Make a new key for ROLE (for root: new keys, as many as before), signed by root's keys.

    Do this when a key may be known to others, and before the signature of root, targets or director
    ends. Boards follow by themselves. The old files go to keys/retired.

    Example: tandem fleet keys rotate director --fleet fleet
    """

    role: Literal["root", "targets", "snapshot", "timestamp", "director"] = argument()
    folder: Path = fleet_option()
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class Status:
    """Show which devices are silent, and when signatures and certificates end.

    Devices of one site that fell silent together are one row; they do not count for --check.
    What `tandem fleet serve` renews by itself needs attention only if it did not. By a timer, use
    --check --due: it prints nothing and exits with 0 while all is fine.

    Example: tandem fleet status --fleet fleet --check --due
    """

    check: bool = option(
        "Exit with 3 if something ends soon (30 days), with 4 if in 7 days or over."
    )
    due: bool = option("Show only what needs attention.")
    folder: Path = fleet_option()
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish BUNDLE in the fleet's repository, signed by the targets key.

    A device installs only what is published. The same bundle once more changes nothing; other
    bytes need another version. The tag of a bundle in a registry is resolved once, now: what it
    names later changes nothing.

    Examples: tandem fleet publish person.bundle --fleet fleet; tandem fleet publish
    oci://registry.example.com/robots/person:1.0 --fleet fleet
    """

    bundle: str = argument("BUNDLE|oci://HOST/NAME:TAG")
    folder: Path = fleet_option()
    registry: RegistryOptions = part()
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class Statement:
    """Write the statement by which one device installs BUNDLE without a broker.

    It goes to the device beside the bundle, over a serial line or UDP. The bundle is published in
    the fleet's repository if it is not. The statement holds as long as the repository's timestamp.

    Example: tandem fleet statement person.bundle --device cam-01 --out cam-01.statement
    """

    bundle: Path = argument(type=FILE)
    device: str = option("The device that shall install it.", required=True, metavar="ID")
    out: Path = option("The file to write.", type=NEW_FILE, required=True)
    retry: bool = option("Also if the device has rolled it back before.")
    gates: str = option(
        "Metadata that the bundle must have, such as task_score>=0.9, licence in [MIT].",
        "--gate", default="", metavar="LIST",
    )  # fmt: skip
    folder: Path = fleet_option()
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class Refresh:
    """Sign the timestamp of the repository again, and the snapshot where it is due.

    A device that finds no fresh timestamp installs nothing: run this from time to time, for
    example by a timer. Prints until when each signature holds.

    Example: tandem fleet refresh --fleet fleet
    """

    folder: Path = fleet_option()
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class Serve:
    """Monitor all devices, run rollouts and serve downloads, until it is stopped.

    It may be killed at any moment: what it decides is in the store before it is sent. A second
    server on the same store stands by; one on a copy of the folder is refused.

    Example: tandem fleet serve --fleet fleet/ --metrics 9464
    """

    folder: Path = fleet_option()
    metrics: str | None = option(
        "Answer Prometheus at http://HOST:PORT/metrics.  [HOST: 127.0.0.1]", metavar="[HOST:]PORT"
    )
    otlp: str | None = option(OTLP, metavar="URL")
    replace: bool = option("Take the place of a server that runs on a copy of the folder.")


@dataclass(frozen=True, slots=True)
class Web:
    """Serve the fleet's page, its live events and its API, until it is stopped.

    A process of its own over the fleet's store: it shows what `tandem fleet serve` notes, and
    writes orders that it carries out. People sign in with accounts (`tandem fleet account add`).

    Example: tandem fleet web --fleet fleet/ --listen 127.0.0.1:8080
    """

    folder: Path = fleet_option()
    listen: str = option(
        "Where to listen. Other addresses than this machine's own need a certificate.",
        default="127.0.0.1:8080", metavar="HOST:PORT",
    )  # fmt: skip
    certificate: Path | None = option("Serve over TLS with this chain.", type=FILE, metavar="PEM")
    key: Path | None = option("The certificate's key.", type=FILE, metavar="PEM")
    trust_header: str | None = option(
        "A proxy in front signs people in, and sets this header to the name of the account.",
        metavar="NAME",
    )
    trust_from: tuple[str, ...] = option(
        "The proxy's address; from elsewhere the header means nothing; repeatable.",
        default=("127.0.0.1", "::1"), metavar="ADDRESS",
    )  # fmt: skip
    otlp: str | None = option(OTLP, metavar="URL")


@dataclass(frozen=True, slots=True)
class AddAccount:
    """Let NAME sign in on the fleet's page, or give NAME another role and password.

    A viewer sees all; an operator also starts and orders rollouts, and labels devices; an approver
    also approves what somebody else has started. Sessions that NAME has end.

    Example: tandem fleet account add anna --role operator --fleet fleet/
    """

    name: str = argument()
    role: Literal["viewer", "operator", "approver"] = option("What NAME may do.", default="viewer")
    password_file: IO[str] | None = option(
        "The password's file, - for stdin.  [default: ask]", type=click.File("r"), metavar="FILE"
    )
    folder: Path = fleet_option()


@dataclass(frozen=True, slots=True)
class Token:
    """Print a new token, by which the program NAME uses the API; an older one of NAME ends.

    Example: tandem fleet account token ci --role operator --fleet fleet/
    """

    name: str = argument()
    role: Literal["viewer", "operator", "approver"] = option("What NAME may do.", default="viewer")
    days: float = option("How long it holds.", min=0.01, max=3650.0, default=365.0)
    folder: Path = fleet_option()


@dataclass(frozen=True, slots=True)
class ListAccounts:
    """List who may use the page and the API.

    Example: tandem fleet account list --fleet fleet/
    """

    folder: Path = fleet_option()
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class RemoveAccount:
    """Remove the person or the token NAME, with all sessions.

    Example: tandem fleet account remove anna --fleet fleet/
    """

    name: str = argument()
    folder: Path = fleet_option()


account = group(
    "account",
    """Manage the accounts of the fleet's page and API.

    Example: tandem fleet account add anna --role operator --fleet fleet/
    """,
    (
        command(AddAccount, "fleet.accounts:add"),
        command(Token, "fleet.accounts:token"),
        command(ListAccounts, "fleet.accounts:list_accounts", name="list"),
        command(RemoveAccount, "fleet.accounts:remove"),
    ),
)


@dataclass(frozen=True, slots=True)
class Logs:
    """Print what rollouts did to the device ID; with -f also its messages as they come.

    Example: tandem fleet logs board-1 --fleet fleet/ -f
    """

    device: str = argument("ID")
    folder: Path = fleet_option()
    follow: bool = option("Go on with what the device says, until Ctrl-C.", "-f", "--follow")
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class VerifyAudit:
    """Check that no row of the log was changed, taken out or put in.

    Each row holds the hash of the one before. Note the hash that is printed somewhere else: with
    --head it shows later that the end of the log was not cut off.

    Example: tandem fleet audit verify --fleet fleet/ --head 5f3a...
    """

    folder: Path = fleet_option()
    head: str = option(
        "A hash that was printed before: it must still be in the log.", default="", metavar="HASH"
    )
    as_json: bool = json_option("Print JSON.")


@dataclass(frozen=True, slots=True)
class ArchiveAudit:
    """Move the older rows of the log to a new FILE, a row of JSON a line.

    The chain of hashes goes on: a new row says which rows were moved and their last hash. Rollouts
    that they tell of stay as they are. Keep the file, which later checks need for those rows.

    Example: tandem fleet audit archive 2026.jsonl --fleet fleet/ --keep 365
    """

    output: Path = argument("FILE", type=NEW_FILE)
    folder: Path = fleet_option()
    keep_days: float = option(
        "Rows that are younger stay.", "--keep", min=0.0, default=90.0, metavar="DAYS"
    )
    as_json: bool = json_option("Print JSON.")


keys = group(
    "keys",
    """Replace the fleet's keys.

    Example: tandem fleet keys rotate director --fleet fleet
    """,
    [command(Rotate, "fleet.trust:rotate")],
)
audit = group(
    "audit",
    """Check the audit log, and archive its older rows.

    Example: tandem fleet audit verify --fleet fleet/
    """,
    [
        command(VerifyAudit, "fleet.logs:verify"),
        command(ArchiveAudit, "fleet.logs:archive", name="archive"),
    ],
)
fleet = group(
    "fleet",
    """Sign releases, enrol devices, and roll releases out, group by group.

    \b
    Examples:
      tandem fleet init fleet --root-keys 3 --threshold 2
      tandem fleet publish person.bundle --fleet fleet
      tandem fleet devices --fleet fleet --watch
      tandem fleet refresh --fleet fleet
      tandem fleet status --fleet fleet
    """,
    (
        command(Init, "fleet.trust:init"),
        identity,
        keys,
        command(Status, "fleet.status:status"),
        command(Publish, "fleet.trust:publish"),
        command(Statement, "fleet.trust:statement"),
        command(Refresh, "fleet.trust:refresh"),
        command(Serve, "fleet.serve:serve"),
        command(Web, "fleet.web:web"),
        account,
        rollout,
        command(Rollback, "fleet.rollout:rollback"),
        command(Devices, "fleet.devices:devices"),
        device,
        query,
        command(RunKit, "fleet.farm:run_kit", name="farm"),
        command(Logs, "fleet.logs:logs"),
        audit,
    ),
)
