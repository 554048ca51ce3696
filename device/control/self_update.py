"""`tandem-agent control self-update`: another version of the agent beside the one that runs."""

import contextlib
import time
from pathlib import Path

from device.agent.config import AgentConfig
from device.agent.version_install import install
from device.control.client import Client
from device.errors import BundleError, StateError, TrustError
from device.files import locked, make_folder, remove, sha256_of
from device.protocol.control import AskProgress, SwitchAgent
from device.protocol.documents import CHUNK_BYTES, BlobSpec, ReleaseSpec
from device.trust.exchange import MQTT_REPOSITORY
from device.update import agent_versions as av
from device.update.bundle import BundleInfo, check_bundle

LOOK_S = 0.2
AFTER_S = 120.0  # what systemd may take to start the agent again, after the trial's limit


def install_version(bundle: Path, config: AgentConfig, repository: str) -> str:
    """Check a bundle, make its environment, and return the environment's name.

    `repository`: a folder or URL with the signed metadata, "" as agent.toml says. Raises
    TandemError: it is damaged, not signed, does not fit this board, its agent does not start, or
    could verify no release.
    """
    info, _ = check_bundle(bundle)
    if info.agent is None:
        raise BundleError(
            f"{bundle} is a release of pipelines, none of the agent: `tandem-agent control install`"
            " takes those"
        )
    sha256 = sha256_of(bundle)
    if not config.dev:
        _check_signed(bundle, info, sha256, config, repository)
    return install(bundle, info, sha256, Path(config.state_dir), signed_only=not config.dev)


def try_version(client: Client, name: str, limit_s: float) -> str:
    """Let the agent make way for a version and wait for the end of its trial.

    Returns "", or why it was given up. Raises StateError: the agent refuses, or there is no end.
    """
    state_dir = client.state_dir
    reported = client.ask(AskProgress()).reported
    if reported is not None and reported.versions is not None and reported.versions.running == name:
        return ""
    try:
        client.ask(SwitchAgent(environment=name, limit_s=limit_s))
    except StateError:
        if av.read_versions(state_dir).trial != name:  # else it ended before it answered
            raise
    end_s = time.monotonic() + limit_s + AFTER_S
    while (versions := av.read_versions(state_dir)).trial == name:
        if time.monotonic() > end_s:
            raise StateError(
                f"the trial of {name} has not ended within {limit_s + AFTER_S:g} s: look whether "
                "systemd starts tandem-agent again (Restart=always)"
            )
        time.sleep(LOOK_S)
    if versions.current == name:
        return ""
    if versions.failed == name and name not in (versions.previous, versions.trial):
        with contextlib.suppress(OSError):  # what stays is removed with the next that is kept
            remove(state_dir / av.FOLDER / name)
    return versions.reason or "its trial was ended from outside, or versions.json cannot be read"


def _check_signed(
    bundle: Path, info: BundleInfo, sha256: str, config: AgentConfig, repository: str
) -> None:
    """Raise TrustError unless the fleet's repository lists this very bundle."""
    from device.trust import desired as rules
    from device.trust.fetchers import FolderFetcher, HttpFetcher
    from device.trust.journal import Journal
    from device.trust.repository import TrustedRepository
    from device.trust.verify import METADATA_FOLDER, trusted_root

    place = repository or config.trust.repository
    if place == MQTT_REPOSITORY:
        raise TrustError(
            "the signature cannot be checked over MQTT: name a folder or URL with the fleet's "
            "metadata by --repository"
        )
    target_path = f"{info.name}/{info.version}/{info.profile}.bundle"
    size = bundle.stat().st_size
    # No chunk is fetched, and no index: what is signed is the whole file.
    blob = BlobSpec(sha256=sha256, bytes=size, chunk_bytes=CHUNK_BYTES, index_sha256=sha256)
    release = ReleaseSpec(
        name=info.name, version=info.version, profile=info.profile, blob=blob, target=target_path
    )
    remote = place.startswith(("http://", "https://"))
    fetcher = HttpFetcher(place) if remote else FolderFetcher(Path(place))
    state = Path(config.state_dir) / "trust"
    make_folder(state, 0o700)
    with locked(state):  # what the agent has seen holds here, too: no older metadata pass
        root = trusted_root(Path(config.trust.dir))
        trusted = TrustedRepository(root, state / METADATA_FOLDER, fetcher, Journal(state))
        trusted.refresh()
        target = trusted.target(target_path)
    if target is None:
        raise TrustError(rules.not_published(release))
    rules.check_release(release, target)
