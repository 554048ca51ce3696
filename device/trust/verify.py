"""The check of one desired document, step by step. Two keys must agree: the repository's says what
exists, the director's what this device runs.
"""

from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path

from device.errors import TrustError
from device.files import locked, make_folder
from device.protocol.signed import open_command, open_desired
from device.trust import desired as rules
from device.trust.director import DIRECTOR, Director, load_director
from device.trust.exchange import Refused, Request, Trusted, Unverified, Verdict
from device.trust.fetchers import WholeFileFetcher
from device.trust.journal import Counter, Journal
from device.trust.repository import TrustedRepository, UnreachableError

METADATA_FOLDER = "metadata"
ROOT = "root.json"


def verify(request: Request, fetcher: WholeFileFetcher) -> Verdict:
    """Return what is to be done with the desired document of a request."""
    with ExitStack() as stack:
        return _verify_locked(request, fetcher, stack)


def _verify_locked(request: Request, fetcher: WholeFileFetcher, stack: ExitStack) -> Verdict:
    """Verify while no other check uses the folder: one of a release and one of a command may run
    at the same time."""
    state, trust = Path(request.state_dir), Path(request.trust_dir)
    try:
        make_folder(state)
        stack.enter_context(locked(state))
        journal = Journal(state)
        root = trusted_root(trust)
        repository = TrustedRepository(root, state / METADATA_FOLDER, fetcher, journal)
        repository.refresh()
        director = load_director(repository, journal, state / DIRECTOR, trust / DIRECTOR)
        if request.kind == "command":
            return _judge_command(request, director)
        return _judge(request, repository, director, journal)
    except UnreachableError as error:
        return Unverified(reason=str(error))
    except TrustError as error:
        return Refused(reason=str(error), again=True)
    except OSError as error:
        return Refused(reason=f"signed metadata cannot be kept: {error}", again=True)


def _judge(
    request: Request, repository: TrustedRepository, director: Director, journal: Journal
) -> Verdict:
    """Return the verdict by fresh metadata. Raises TrustError of the repository."""
    try:
        desired, signed = open_desired(request.desired.encode())
        if signed is None:
            return Refused(reason="the desired document is not signed")
        rules.check_signatures(signed, director)
        rules.check_address(desired, request.device, datetime.now(timezone.utc))
        digest = rules.payload_hash(signed)
        journal.check_counter(desired.counter, digest, director.keys_text)
    except (TrustError, ValueError) as error:
        return Refused(reason=str(error))
    journal.note(counter=Counter(desired.counter, digest, director.keys_text))
    target = repository.target(desired.release.target)
    if target is None:
        return Refused(reason=rules.not_published(desired.release), again=True)
    try:
        rules.check_release(desired.release, target)
    except TrustError as error:
        return Refused(reason=str(error))
    return Trusted(custom=rules.custom_of(target))


def _judge_command(request: Request, director: Director) -> Verdict:
    """Return the verdict on a command; whether it is a replay the agent knows."""
    try:
        command, signed = open_command(request.desired.encode())
        if signed is None:
            return Refused(reason="the command is not signed")
        rules.check_signatures(signed, director, rules.COMMAND)
        now = datetime.now(timezone.utc)
        rules.check_address(command, request.device, now, rules.COMMAND)
    except (TrustError, ValueError) as error:
        return Refused(reason=str(error))
    return Trusted()


def trusted_root(folder: Path) -> bytes:
    """Return the root.json that the board was given. Raises TrustError."""
    try:
        return (folder / ROOT).read_bytes()
    except OSError as error:
        raise TrustError(
            f"this board has no {folder / ROOT} ({error.strerror}), and without it no signature "
            "can be checked: copy the folder `trust` of the fleet there, and name it as `dir` in "
            "[trust] of agent.toml"
        ) from error
