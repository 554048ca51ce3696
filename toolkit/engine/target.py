"""The target of a build: a profile and its JetPack."""

from dataclasses import dataclass

from device.choices import list_choices
from device.errors import ProfileError
from device.profile import JetPack, Profile, dla_era, find_jetpack, load_profile

HOST = "laptop"
"""The profile of this machine, where a model is run but no engine is built."""


@dataclass(frozen=True, slots=True)
class Target:
    """A device profile with one of its JetPacks; None where the machine has no JetPack."""

    profile: Profile
    jetpack: JetPack | None

    @property
    def tensorrt(self) -> str | None:
        """The TensorRT of the JetPack, such as "10.3"; its DLA rules apply."""
        return self.jetpack.tensorrt if self.jetpack else None


def choose_target(profile: str, jetpack: str | None = None) -> Target:
    """Load the profile and take the JetPack asked for, or the best that it supports.

    Best is the newest whose TensorRT still drives the module's DLA (some drop it); on modules
    without a DLA the newest.

    Raises ProfileError: no such profile, or a JetPack that does not support it.
    """
    loaded = load_profile(profile)
    if jetpack is not None:
        if jetpack not in loaded.jetpacks:
            takes = list_choices(jetpack, loaded.jetpacks)
            raise ProfileError(
                f"JetPack {jetpack} does not support {loaded.name}; it takes: {takes}."
            )
        return Target(loaded, find_jetpack(jetpack))
    known = [find_jetpack(version) for version in loaded.jetpacks]
    with_dla = [j for j in known if loaded.dla_cores and dla_era(j.tensorrt) != "none"]
    candidates = with_dla or known
    return Target(loaded, candidates[-1] if candidates else None)
