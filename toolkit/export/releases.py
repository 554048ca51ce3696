"""The releases of TensorRT that read an export: those that the JetPacks of a profile bring.

A profile lists its JetPacks, and `configs/jetpack.toml` which TensorRT each brings.
"""

from dataclasses import dataclass
from typing import Literal

from device.errors import ProfileError
from device.profile import Profile, dla_era, load_jetpacks, load_profile
from toolkit.dla.rules.rule import Version, parse_version, version_text
from toolkit.errors import BuildError

Era = Literal["implicit", "explicit"]

FIRST: Version = (8, 5)
FIRST_EXPLICIT: Version = (10, 8)
"""As on the board: from the first TensorRT without a DLA that wants a calibration cache."""

MAX_OPSETS: tuple[tuple[Version, int], ...] = (
    ((8, 5), 17),
    ((10,), 20),
    ((10, 15), 24),
)
"""First release -> the newest opset that its parser reads (onnx-tensorrt, docs/operators.md of 8.5,
10.0, 10.15 and 11.2)."""


@dataclass(frozen=True, slots=True)
class Release:
    """A TensorRT and the JetPacks that bring it. `max_opset`: the newest that its parser reads.

    Era "implicit": ranges come from a calibration cache. "explicit": strongly typed networks with
    Q/DQ, and no calibrators. `has_dla`: on Jetson.
    """

    version: str
    era: Era
    jetpack: str
    max_opset: int
    has_dla: bool

    @property
    def number(self) -> Version:
        """The version as numbers, which compare."""
        return parse_version(self.version)


def releases_of(profile: Profile) -> tuple[Release, ...]:
    """Return what the JetPacks of a profile bring, oldest first; of a computer without any, all.

    Raises BuildError: nothing that an export is for.
    """
    jetpacks: dict[Version, list[str]] = {}
    for jetpack in load_jetpacks():
        if profile.jetpacks and jetpack.version not in profile.jetpacks:
            continue
        for version in (jetpack.tensorrt, *jetpack.also_tensorrt):
            jetpacks.setdefault(_three(version), []).append(jetpack.version)
    releases = [_release(version, names) for version, names in jetpacks.items()]
    taken = sorted((row for row in releases if row.number >= FIRST), key=lambda row: row.number)
    if not taken:
        versions = ", ".join(row.version for row in releases)
        raise BuildError(
            f"{profile.name} has TensorRT {versions}, and exports begin with "
            f"{version_text(FIRST)} (JetPack 5.1)."
        )
    return tuple(taken)


def profile_of(name: str) -> Profile:
    """Return the profile that an engine names. Raises BuildError: it is not a shipped one."""
    try:
        return load_profile(name)
    except ProfileError as error:
        raise BuildError(
            f"The engine is for profile {name!r}, which is not one of Tandem's; give its file with "
            "--profile."
        ) from error


def _release(version: Version, jetpacks: list[str]) -> Release:
    shown = jetpacks[0] if len(jetpacks) == 1 else f"{jetpacks[0]} to {jetpacks[-1]}"
    return Release(
        version=version_text(version),
        era="implicit" if version < FIRST_EXPLICIT else "explicit",
        jetpack=shown,
        max_opset=next((opset for first, opset in reversed(MAX_OPSETS) if version >= first), 13),
        has_dla=dla_era(version_text(version)) != "none",
    )


def _three(text: str) -> Version:
    """Return a version of three numbers: JetPack's tables say 10.3 and 8.5.2.2, too."""
    return (*parse_version(text), 0, 0)[:3]
