"""How a release is fetched: what the desired document says, within what agent.toml allows."""

from collections.abc import Mapping
from pathlib import Path

from device.agent.config import UpdateTable
from device.protocol.documents import Desired
from device.update.fetching import FetchOptions
from device.update.sources.source import file_names


def fetch_options(desired: Desired, config: UpdateTable, bases: Mapping[str, Path]) -> FetchOptions:
    """Return how to fetch a release: the smaller limit holds, its own sources come first.

    `bases`: folders of unpacked bundles, by the SHA-256 of the bundle.
    """
    release = desired.release
    limits = (config.max_bytes_per_s, desired.policy.max_bytes_per_s)
    return FetchOptions(
        bases=bases,
        bytes_per_s=min((limit for limit in limits if limit is not None), default=None),
        places=(*release.sources, *config.sources),
        names=file_names(release.blob.sha256, release.target),
        ca=None if config.ca is None else Path(config.ca),
    )
