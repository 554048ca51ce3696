"""Print the known devices, and the source of each figure."""

import itertools
from collections.abc import Iterable, Sequence

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from device.profile import (
    DlaEra,
    Figure,
    JetPack,
    PowerMode,
    Profile,
    dla_era,
    figures,
    list_profiles,
    load_jetpacks,
    load_profile,
    load_sources,
)
from toolkit.cli.commands.profiles import Profiles, Show

# The last part of a figure's key -> its unit; counts have none.
_UNITS: dict[str, str] = {
    "max_mhz": "MHz",
    "fp32_tflops": "TFLOPS",
    "fp16_tflops": "TFLOPS",
    "int8_tops": "TOPS",
    "sram_kib": "KiB",
    "gb": "GB",
    "bus_bits": "bit",
    "bandwidth_gbps": "GB/s",
}
_ERA_MEANS: dict[DlaEra, str] = {
    "calibration-cache": "INT8 scales reach the DLA as a calibration cache; Q/DQ is refused",
    "none": "TensorRT has no DLA here: everything runs on the GPU",
    "qdq": "INT8 scales reach the DLA as Q/DQ; there are no calibrators",
}


def overview(options: Profiles) -> None:
    """Print the list of the shipped profiles, unless a subcommand follows."""
    if click.get_current_context().invoked_subcommand is not None:
        if options.as_json:
            raise click.UsageError("--json goes behind: tandem profiles show NAME --json")
        return
    shipped = list_profiles()
    if options.as_json:
        click.echo(_json(shipped))
        return
    console = Console()
    console.print(_overview(shipped, wide=console.width >= 120))
    click.echo("`tandem profiles show NAME` gives every figure with its source.")


def show(options: Show) -> None:
    """Print one profile, and what it means for a build. Raises TandemError."""
    profile = load_profile(options.name)
    if options.as_json:
        click.echo(_json(profile))
        return
    console = Console()
    console.print(f"[bold]{profile.name}[/]: {profile.title} ({profile.part})", highlight=False)
    console.print(f"{profile.soc}, CPU {profile.cpu}. {profile.note}", highlight=False)
    console.print()
    console.print(_figure_table(profile))
    for key, figure in figures(profile):
        if figure.note:
            console.print(f"{key}: {figure.note}", highlight=False)
    if profile.power_modes:
        console.print()
        console.print(_mode_table(profile.power_modes))
    console.print("\nWhat it means for Tandem", style="bold")
    for line in consequences(profile, load_jetpacks()):
        console.print(f"- {line}", highlight=False)
    console.print("\nSources", style="bold")
    for line in _source_lines(profile):
        console.print(line, highlight=False, soft_wrap=True)


def consequences(profile: Profile, jetpacks: Sequence[JetPack]) -> tuple[str, ...]:
    """Return what a profile's hardware and its JetPacks mean for a build."""
    supported = [jetpack for jetpack in jetpacks if jetpack.version in profile.jetpacks]
    lines = [_processors(profile)]
    if profile.gpu and profile.gpu.int8_tops is None:
        lines.append("The GPU has no INT8 path faster than FP32: build with FP16.")
    if profile.dla and profile.dla.fp16_tflops is None:
        lines.append("The DLA's FP16 rate is not published: give the DLA INT8.")
    lines += _eras(profile, supported)
    old = [jetpack for jetpack in supported if _number(jetpack.python) < (3, 10)]
    if old:
        newest = max(_number(jetpack.python)[:2] for jetpack in old)
        lines.append(
            f"JetPack {_span(old)} comes with Python {newest[0]}.{newest[1]} at most: install 3.10 "
            "or newer beside it for Tandem; that JetPack's own TensorRT module does not load there."
        )
    return tuple(lines)


def _processors(profile: Profile) -> str:
    if profile.gpu is None:
        return "No GPU and no DLA: every segment runs on the CPU through onnxruntime."
    if not profile.dla_cores:
        return f"No DLA: everything runs on the GPU (kernels are compiled for sm_{profile.sm})."
    cores = ", ".join(f"dla{core}" for core in range(profile.dla_cores))
    return f"A plan places nodes on gpu (sm_{profile.sm}) and {cores}."


def _eras(profile: Profile, jetpacks: Iterable[JetPack]) -> list[str]:
    """One line for each run of JetPacks whose TensorRT treats the DLA alike."""
    if not profile.dla_cores:
        releases = list(jetpacks)
        versions = f"TensorRT {releases[0].tensorrt} to {releases[-1].tensorrt}" if releases else ""
        return [f"JetPack {_span(releases)} brings {versions}."] if releases else []
    lines = []
    for era, run in itertools.groupby(jetpacks, lambda jetpack: dla_era(jetpack.tensorrt)):
        alike = list(run)
        tensorrt = " to ".join(dict.fromkeys((alike[0].tensorrt, alike[-1].tensorrt)))
        lines.append(f"JetPack {_span(alike)} (TensorRT {tensorrt}): {_ERA_MEANS[era]}.")
    return lines


def _span(jetpacks: Sequence[JetPack]) -> str:
    return " to ".join(dict.fromkeys((jetpacks[0].version, jetpacks[-1].version)))


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _overview(shipped: Iterable[Profile], wide: bool) -> Table:
    """One row for each profile; a narrow terminal gets no titles and counts the power modes."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("name", no_wrap=True)
    if wide:
        table.add_column("module")
    for name in ("SM", "INT8\nTOPS", "DLA", "GB", "GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("power modes" if wide else "power\nmodes")
    table.add_column("JetPacks")
    for profile in shipped:
        int8 = profile.gpu.int8_tops if profile.gpu else None
        modes = [mode.name for mode in profile.power_modes]
        table.add_row(
            profile.name,
            *([profile.title] if wide else []),
            str(profile.sm or "-"),
            f"{int8.value:g}" if int8 else "-",
            str(profile.dla_cores or "-"),
            f"{profile.memory.gb.value:g}",
            f"{profile.memory.bandwidth_gbps.value:g}",
            " ".join(modes) if wide else str(len(modes)),
            _jetpack_ranges(profile.jetpacks) or "-",
        )
    return table


def _jetpack_ranges(versions: Iterable[str]) -> str:
    """Shorten versions to one range for each major number: "5.1-5.1.6 6.0-6.2.3"."""
    ranges = []
    for _, run in itertools.groupby(versions, lambda version: version.partition(".")[0]):
        major = [version.replace(" ", "") for version in run]
        ranges.append("-".join(dict.fromkeys((major[0], major[-1]))))
    return " ".join(ranges)


def _figure_table(profile: Profile) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for name in ("figure", "value", "unit", "source", "confidence"):
        table.add_column(name, justify="right" if name == "value" else "left", no_wrap=True)
    for key, figure in figures(profile):
        unit = _UNITS.get(key.rpartition(".")[2], "")
        table.add_row(key, _value(figure), unit, figure.source, figure.confidence)
    return table


def _value(figure: Figure[float]) -> str:
    return f"{figure.value:g}" if figure.value < 1e5 else f"{figure.value:.0f}"


# Column of the power mode table -> field of the mode.
_MODE_COLUMNS: tuple[tuple[str, str], ...] = (
    ("id", "id"),
    ("CPU cores", "cpu_online"),
    ("CPU MHz", "cpu_max_mhz"),
    ("GPU TPC", "gpu_tpc"),
    ("GPU MHz", "gpu_max_mhz"),
    ("DLA cores", "dla_cores"),
    ("DLA MHz", "dla_max_mhz"),
    ("EMC MHz", "emc_max_mhz"),
)


def _mode_table(modes: Sequence[PowerMode]) -> Table:
    """Show the clocks of each power mode; "-" where no source gives them."""
    known = [
        (title, field)
        for title, field in _MODE_COLUMNS
        if any(getattr(mode, field) is not None for mode in modes)
    ]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("power mode", no_wrap=True)
    for title, _ in known:
        table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
    table.add_column("source", no_wrap=True)
    table.add_column("confidence", no_wrap=True)
    for mode in modes:
        cells = [getattr(mode, field) for _, field in known]
        texts = ["-" if cell is None else f"{cell:.5g}" for cell in cells]
        table.add_row(mode.name, *texts, mode.source, mode.confidence)
    return table


def _source_lines(profile: Profile) -> list[str]:
    known = load_sources()
    used = [figure.source for _, figure in figures(profile)]
    used += [mode.source for mode in profile.power_modes]
    ids = dict.fromkeys(part for source in used for part in source.split(";"))
    lines = []
    for name in sorted(ids, key=lambda name: (name[0], len(name), name)):
        source = known.get(name)
        text = f"{source.title} {source.address}".rstrip() if source else "not described"
        lines.append(f"{name}: {text}")
    return lines


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
