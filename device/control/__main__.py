"""The command `tandem-agent control`: each action writes lines of JSON."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from device.agent.config import load_agent_config
from device.control.client import Client, board_facts, inventory
from device.control.receive import erase, receive
from device.control.self_update import install_version, try_version
from device.control.upload_request import DESIRED, DESIRED_OF, REPOSITORY
from device.errors import ConfigError, TandemError
from device.protocol.control import AskProgress, Cancel, Commit, Install, Rollback
from device.protocol.signed import open_desired
from device.update.agent_versions import TRIAL_S, read_versions

CONFIG = Path("/etc/tandem/agent.toml")
Action = Callable[[Client, argparse.Namespace], int]


def _facts(client: Client, _: argparse.Namespace) -> int:
    _say(board_facts(client))
    return 0


def _inventory(client: Client, _: argparse.Namespace) -> int:
    for chunks in inventory(client):
        _say(chunks)
    return 0


def _progress(client: Client, _: argparse.Namespace) -> int:
    _say(client.ask(AskProgress()))
    return 0


def _receive(client: Client, _: argparse.Namespace) -> int:
    slots = client.ask(AskProgress()).slots
    bases = {row.sha256: client.state_dir / "slots" / row.slot for row in slots}
    receive(client.state_dir, bases, sys.stdin.buffer, sys.stdout.buffer)
    return 0


def _install(client: Client, options: argparse.Namespace) -> int:
    """Hand a folder over and follow the update; exit status 0 if it is live."""
    folder: Path = options.folder.resolve()
    device = client.ask(AskProgress()).device
    text, bundle = _desired_in(folder, device)
    try:
        desired, _ = open_desired(text.encode())
    except ValueError as error:
        raise ConfigError(f"the desired document of {folder} is not understood: {error}") from error
    metadata = folder / REPOSITORY
    repository = str(metadata) if metadata.is_dir() else ""
    _say(client.ask(Install(desired=text, bundle=str(bundle), repository=repository)))
    ended = False
    for answer in client.follow(desired.request):
        _say(answer)
        assert answer.reported is not None
        update = answer.reported.update
        # That of an earlier request says nothing: this one was cancelled or withdrawn.
        ended = update.request == desired.request and (
            update.phase == "live" or update.waits_for_commit
        )
    if ended and folder.parent == client.state_dir.resolve():
        erase(client.state_dir)  # the slot has it
    return 0 if ended else 1


def _cancel(client: Client, options: argparse.Namespace) -> int:
    _say(client.ask(Cancel(request=options.request)))
    return 0


def _rollback(client: Client, _: argparse.Namespace) -> int:
    _say(client.ask(Rollback()))
    return 0


def _commit(client: Client, _: argparse.Namespace) -> int:
    _say(client.ask(Commit()))
    return 0


def _self_update(client: Client, options: argparse.Namespace) -> int:
    """Try another version of the agent; exit status 0 if it stays."""
    if "SUDO_UID" in os.environ and options.config != CONFIG:
        # A login that has no more than `control` by sudo would choose whom to trust.
        raise ConfigError(f"self-update by sudo takes {CONFIG} alone: leave out --config")
    config = load_agent_config(options.config)
    name = install_version(options.bundle, config, options.repository)
    reason = try_version(client, name, options.limit)
    _say(read_versions(client.state_dir))
    if reason:
        print(f"tandem-agent: {name} is given up: {reason}", file=sys.stderr)
    return 1 if reason else 0


# Action -> what does it, and what the help says.
ACTIONS: Mapping[str, tuple[Action, str]] = {
    "facts": (_facts, "what this board is and what it runs"),
    "inventory": (_inventory, "the chunks that its slots hold"),
    "progress": (_progress, "the slots and the report of the agent"),
    "receive": (_receive, "take a bundle from standard input into the inbox"),
    "install": (_install, "install the bundle of a folder and follow that"),
    "cancel": (_cancel, "end an update that is not live"),
    "commit": (_commit, "keep a release on trial that waits for that"),
    "rollback": (_rollback, "go back to the release in the other slot"),
    "self-update": (_self_update, "try another version of the agent, and keep it if it works"),
}


def _desired_in(folder: Path, device: str) -> tuple[str, Path]:
    """Return the desired document of a folder for this device, and where its bundle is."""
    for name in (DESIRED_OF.format(device=device), DESIRED):
        try:
            return (folder / name).read_text(), folder
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(f"cannot read {folder / name}: {error.strerror}") from error
    raise ConfigError(
        f"{folder} has nothing for the device {device}: write it with `tandem flash BUNDLE --to "
        f"dir://FOLDER --device {device}`"
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="tandem-agent control",
        description="Asks the agent that runs on this board. Every action writes lines of JSON.",
        epilog="example: tandem-agent control install /media/usb",
    )
    parser.add_argument(
        "--config", type=Path, default=CONFIG, help=f"agent.toml of this board (default: {CONFIG})"
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (_, text) in ACTIONS.items():
        action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == "install":
            action.add_argument("folder", type=Path, help="what `tandem flash --to dir://` wrote")
        if name == "self-update":
            action.add_argument("bundle", type=Path, help="what `tandem bundle agent` wrote")
            action.add_argument(
                "--repository",
                default="",
                metavar="DIR|URL",
                help="where the signed metadata are (default: as agent.toml says)",
            )
            action.add_argument(
                "--limit",
                type=float,
                default=TRIAL_S,
                metavar="SECONDS",
                help="so long MQTT and the pipeline may take to come back (default: %(default)g)",
            )
        if name == "cancel":
            action.add_argument("request", help="the request of the desired document")
    return parser


def _say(line: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Do one action; exit status 1 with a sentence if that fails."""
    options = make_parser().parse_args(argv)
    try:
        client = Client(Path(load_agent_config(options.config).state_dir))
        try:
            return ACTIONS[options.action][0](client, options)
        finally:
            client.close()
    except TandemError as error:
        print(f"tandem-agent: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read has gone; the agent goes on
        return 1


if __name__ == "__main__":
    sys.exit(main())
