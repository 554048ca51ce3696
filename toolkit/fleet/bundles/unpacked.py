"""A bundle unpacked into a folder that goes away, with its engines open."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from device.engine.file import Engine, open_engine
from device.errors import BundleError
from device.update.bundle import BundleInfo, extract_bundle


@dataclass(frozen=True, slots=True)
class Unpacked:
    """`path` is the bundle, `folder` has its members, `engines` are by the member's name."""

    path: Path
    folder: Path
    info: BundleInfo
    engines: Mapping[str, Engine]


def engine_members(info: BundleInfo) -> tuple[str, ...]:
    """Return the names of the members that are engines, each once, in the order of the models."""
    return tuple(dict.fromkeys(run.engine for run in info.runs))


def label_members(info: BundleInfo) -> tuple[str, ...]:
    """Return the names of the members that are labels, each once, in the order of the models."""
    return tuple(dict.fromkeys(run.labels for run in info.runs))


@contextmanager
def unpacked(path: Path) -> Iterator[Unpacked]:
    """Yield a bundle with every byte checked.

    Raises BundleError: it is damaged, or a release of the agent; EngineError: an engine is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-bundle-") as place, ExitStack() as stack:
        folder = Path(place) / "bundle"
        info = extract_bundle(path, folder)
        if info.agent is not None:
            raise BundleError(
                f"{path} is a release of the agent, which has no engines: `tandem bundle inspect` "
                "and `verify` take it"
            )
        engines = {
            name: stack.enter_context(open_engine(folder / name)) for name in engine_members(info)
        }
        for engine in engines.values():
            engine.verify()
        yield Unpacked(path, folder, info, engines)
