"""Device profiles: what a module has, in figures that each carry a source and a confidence."""

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

import configs
from device.choices import list_choices
from device.errors import ProfileError
from device.toml_file import convert, parse_toml

Confidence = Literal["high", "medium", "low", "unverified"]
DlaEra = Literal["calibration-cache", "none", "qdq"]
T = TypeVar("T")

PROFILES = configs.ROOT / "profiles"


class _Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every part of a profile: frozen, and unknown keys are refused."""


class Figure(_Value, Generic[T], frozen=True, kw_only=True):
    """One published or derived number; `source`: ids of `configs/sources.toml`, ";" between."""

    value: T
    source: str
    confidence: Confidence
    note: str = ""


class Gpu(_Value, frozen=True, kw_only=True):
    """The GPU at its highest clock; dense rates, no sparsity."""

    arch: str
    sm: int  # 87 for compute capability 8.7
    sm_count: Figure[int]
    cuda_cores: Figure[int]
    tensor_cores: Figure[int]
    max_mhz: Figure[float]
    fp32_tflops: Figure[float]
    fp16_tflops: Figure[float]
    int8_tops: Figure[float] | None = None  # None: no INT8 path faster than FP32


class Dla(_Value, frozen=True, kw_only=True):
    """The DLA cores; dense rates per core at the highest clock."""

    generation: Literal["v1", "v2"]
    cores: Figure[int]
    max_mhz: Figure[float]
    int8_tops: Figure[float]
    fp16_tflops: Figure[float] | None = None  # None: not published
    sram_kib: Figure[int]  # per core; shared figures say so in their note


class Memory(_Value, frozen=True, kw_only=True):
    """The memory that all processors share (on the host profiles: the GPU's own)."""

    gb: Figure[float]
    kind: str
    bus_bits: Figure[int] | None = None
    max_mhz: Figure[float] | None = None
    bandwidth_gbps: Figure[float]


class PowerMode(_Value, frozen=True, kw_only=True):
    """One nvpmodel mode: clocks in MHz, None where no source gives the figure."""

    name: str
    id: int
    cpu_online: int | None = None
    cpu_max_mhz: float | None = None
    gpu_tpc: int | None = None
    gpu_max_mhz: float | None = None
    dla_cores: int | None = None
    dla_max_mhz: float | None = None
    emc_max_mhz: float | None = None
    source: str
    confidence: Confidence


class Profile(_Value, frozen=True, kw_only=True):
    """A module, its power modes and the JetPacks that it takes."""

    name: str
    title: str
    part: str
    soc: str
    cpu: str
    gpu: Gpu | None = None
    dla: Dla | None = None
    memory: Memory
    power_modes: tuple[PowerMode, ...] = ()
    jetpacks: tuple[str, ...] = ()  # versions in configs/jetpack.toml that support the module
    note: str = ""

    @property
    def sm(self) -> int | None:
        """GPU architecture that kernels are compiled for (87 is compute capability 8.7)."""
        return self.gpu.sm if self.gpu else None

    @property
    def dla_cores(self) -> int:
        """Number of DLA cores, 0 where the module has none."""
        return self.dla.cores.value if self.dla else 0

    def power_mode(self, name: str) -> PowerMode:
        """Find a power mode by its nvpmodel name, whatever its case."""
        for mode in self.power_modes:
            if mode.name.casefold() == name.casefold():
                return mode
        modes = list_choices(name, (mode.name for mode in self.power_modes))
        raise ProfileError(
            f"profile {self.name!r} has no power mode {name!r}: use one of its modes ({modes})."
        )


class JetPack(_Value, frozen=True, kw_only=True):
    """One JetPack and what it brings; empty where no source gives the version."""

    version: str
    l4t: tuple[str, ...]  # more than one where a JetPack was refreshed
    ubuntu: str
    python: str
    kernel: str
    cuda: str
    cudnn: str
    tensorrt: str
    also_tensorrt: tuple[str, ...] = ()  # packages of their own that NVIDIA gives for it
    cuda_archs: tuple[int, ...]
    source: str
    confidence: Confidence
    note: str = ""


class JetPackFile(_Value, frozen=True, kw_only=True):
    """`configs/jetpack.toml`, oldest JetPack first."""

    jetpack: tuple[JetPack, ...]


class Source(_Value, frozen=True, kw_only=True):
    """Where figures come from; `address` is empty where the source has no public page."""

    title: str
    address: str = ""


# The first TensorRT of each era on Jetson, newest first.
_ERAS: tuple[tuple[tuple[int, ...], DlaEra], ...] = (
    ((11, 4, 1), "qdq"),  # strongly typed networks; 11.4.0 knows the DLA on Windows only
    ((10, 8), "none"),  # 10.8 to 11.3 have no JetPack build with DLA
    ((0,), "calibration-cache"),  # refuses Q/DQ on the DLA
)


def dla_era(tensorrt_version: str) -> DlaEra:
    """Say how a TensorRT on Jetson takes INT8 scales for the DLA, or "none" without DLA."""
    try:
        version = tuple(int(part) for part in tensorrt_version.split("."))
    except ValueError as error:
        raise ProfileError(
            f"TensorRT version {tensorrt_version!r} is not numbers with dots between: "
            "give it as TensorRT prints it, such as 10.3.0."
        ) from error
    return next(era for first, era in _ERAS if version >= first)


def load_profile(name_or_path: str | Path) -> Profile:
    """Load a shipped profile by name, or any profile from the path of its TOML file."""
    path = Path(name_or_path)
    if path.suffix != ".toml" and len(path.parts) == 1:
        path = _shipped(path.name)
    profile = _decode(path, Profile)
    _check(profile, path)
    return profile


def list_profiles() -> tuple[Profile, ...]:
    """Load every shipped profile, by name."""
    return tuple(load_profile(name) for name in sorted(p.stem for p in PROFILES.glob("*.toml")))


def profile_of_parts(compatible: str) -> Profile | None:
    """Return the shipped profile of a device tree's `compatible`, None if it names none.

    It has the part numbers of module and carrier: "nvidia,p3768-0000+p3767-0000-super".
    """
    parts = set(re.findall(r"p\d{4}-\d{4}(?:-super)?", compatible))
    # A board in super mode carries both names, with and without the suffix.
    for profile in sorted(list_profiles(), key=lambda each: not each.name.endswith("-super")):
        numbers = re.findall(r"(p\d{4}-)(\d{4})((?:/\d{4})*)", profile.part)
        suffix = "-super" if profile.name.endswith("-super") else ""
        for board, first, more_skus in numbers:
            if any(f"{board}{sku}{suffix}" in parts for sku in (first + more_skus).split("/")):
                return profile
    return None


def load_jetpacks() -> tuple[JetPack, ...]:
    """Load every known JetPack, oldest first."""
    return _decode(configs.ROOT / "jetpack.toml", JetPackFile).jetpack


def load_sources() -> dict[str, Source]:
    """Load where the figures come from, by id."""
    return _decode(configs.ROOT / "sources.toml", dict[str, Source])


def find_jetpack(version: str) -> JetPack:
    """Find a JetPack by its version ("6.2")."""
    known = {jetpack.version: jetpack for jetpack in load_jetpacks()}
    if version in known:
        return known[version]
    raise ProfileError(
        f"JetPack {version!r} is not known: use one of {list_choices(version, known)}."
    )


def figures(value: msgspec.Struct, path: str = "") -> Iterator[tuple[str, Figure[Any]]]:
    """Walk every figure of a profile with the path of its key ("gpu.int8_tops")."""
    for field in value.__struct_fields__:
        part, where = getattr(value, field), f"{path}{field}"
        if isinstance(part, Figure):
            yield where, part
        elif isinstance(part, msgspec.Struct):
            yield from figures(part, f"{where}.")


def _shipped(name: str) -> Path:
    path = PROFILES / f"{name}.toml"
    if path.is_file():
        return path
    names = (shipped.stem for shipped in PROFILES.glob("*.toml"))
    raise ProfileError(
        f"there is no device profile {name!r}: use one of {list_choices(name, names)}, or the path "
        "of a TOML file."
    )


def _decode(path: Path, kind: type[T]) -> T:
    """Read a TOML file strictly; every failure names the file, and the key where there is one."""
    try:
        return convert(_tables(path.read_bytes()), kind)
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ProfileError(
            f"{path}: {error}: correct it after one of the files in configs/profiles."
        ) from error


# A plan asks for the JetPacks several times, and Python takes 6 ms to parse them.
_tables = lru_cache(maxsize=64)(parse_toml)


def _check(profile: Profile, path: Path) -> None:
    """Refuse what no hardware has, so that nobody divides by it later."""
    for where, figure in figures(profile):
        least = 0 if where == "gpu.tensor_cores" else 1e-9
        if not (math.isfinite(figure.value) and figure.value >= least):
            raise ProfileError(f"{path}: {where} is {figure.value}, and must be above zero.")
    names = [mode.name.casefold() for mode in profile.power_modes]
    if len(set(names)) != len(names):
        raise ProfileError(f"{path}: two power modes have the same name: rename one of them.")
