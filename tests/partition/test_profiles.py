"""Device profiles: loading them strictly, and figures that agree with the formulas behind them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from device.errors import ProfileError
from device.profile import (
    Profile,
    dla_era,
    figures,
    find_jetpack,
    list_profiles,
    load_jetpacks,
    load_profile,
    load_sources,
)
from toolkit.cli.actions.profiles import consequences
from toolkit.cli.commands.profiles import profiles

SHIPPED = {profile.name: profile for profile in list_profiles()}
JETPACKS = load_jetpacks()
SOURCES = load_sources()

# Multiply-adds for each clock of one tensor core (FP16, INT8), dense, by SM. Thor's is for an SM.
TENSOR_CORE_MACS = {72: (64, 128), 87: (256, 512)}
THOR_SM_OPS = {"fp16": 8192, "int8": 16384}
DLA_INT8_MACS = {"v1": 2048, "v2": 8192}


def every_profile() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("profile", SHIPPED.values(), ids=SHIPPED.keys())


def own_profile(tmp_path: Path, old: str, new: str) -> Path:
    """A copy of a shipped profile with one text replaced, which must be there exactly once."""
    shipped = (Path(__file__).parents[2] / "configs/profiles/orin-nx-16gb.toml").read_text()
    assert shipped.count(old) == 1
    path = tmp_path / "mine.toml"
    path.write_text(shipped.replace(old, new))
    return path


def test_every_module_of_the_family_is_shipped() -> None:
    assert set(SHIPPED) >= {
        "jetson-nano", "tx2", "tx2-nx", "xavier-nx-8gb", "xavier-nx-16gb", "agx-xavier-32gb",
        "agx-xavier-64gb", "agx-xavier-industrial", "orin-nano-4gb", "orin-nano-4gb-super",
        "orin-nano-8gb", "orin-nano-8gb-super", "orin-nx-8gb", "orin-nx-8gb-super",
        "orin-nx-16gb", "orin-nx-16gb-super", "agx-orin-32gb", "agx-orin-32gb-super",
        "agx-orin-64gb", "agx-orin-industrial", "t4000", "agx-thor", "h200", "laptop",
    }  # fmt: skip


@every_profile()
def test_a_shipped_profile_is_loaded_by_the_name_it_carries(profile: Profile) -> None:
    assert load_profile(profile.name) == profile


@every_profile()
def test_every_source_is_described(profile: Profile) -> None:
    named = {key: figure.source for key, figure in figures(profile)}
    named |= {f"mode {mode.name}": mode.source for mode in profile.power_modes}
    unknown = {key: ids for key, ids in named.items() if not set(ids.split(";")) <= set(SOURCES)}
    assert unknown == {}


@every_profile()
def test_a_figure_that_is_not_certain_says_why_or_where_from(profile: Profile) -> None:
    silent = [
        key
        for key, figure in figures(profile)
        if figure.confidence == "unverified" and not figure.note
    ]
    assert silent == []


@every_profile()
def test_gpu_rates_follow_from_units_and_clock(profile: Profile) -> None:
    gpu = profile.gpu
    if gpu is None:
        assert profile.name == "laptop"
        return
    ghz = gpu.max_mhz.value / 1e3
    assert gpu.fp32_tflops.value == pytest.approx(2 * gpu.cuda_cores.value * ghz / 1e3, rel=0.03)
    if gpu.sm in TENSOR_CORE_MACS:
        fp16, int8 = (2 * gpu.tensor_cores.value * macs for macs in TENSOR_CORE_MACS[gpu.sm])
    elif gpu.sm == 110:
        fp16, int8 = (gpu.sm_count.value * ops for ops in THOR_SM_OPS.values())
    elif gpu.sm == 90:
        fp16, int8 = (gpu.sm_count.value * ops * 1830 / 1980 for ops in (4096, 8192))
    else:
        assert gpu.int8_tops is None
        assert gpu.tensor_cores.value == 0
        assert gpu.fp16_tflops.value == pytest.approx(2 * gpu.fp32_tflops.value, rel=0.03)
        return
    assert gpu.fp16_tflops.value == pytest.approx(fp16 * ghz / 1e3, rel=0.03)
    assert gpu.int8_tops is not None
    assert gpu.int8_tops.value == pytest.approx(int8 * ghz / 1e3, rel=0.03)


@every_profile()
def test_dla_rates_follow_from_units_and_clock(profile: Profile) -> None:
    dla = profile.dla
    if dla is None:
        return
    tops = 2 * DLA_INT8_MACS[dla.generation] * dla.max_mhz.value / 1e6
    assert dla.int8_tops.value == pytest.approx(tops, rel=0.03)
    if dla.generation == "v1":
        assert dla.fp16_tflops is not None
        assert dla.fp16_tflops.value == pytest.approx(tops / 2, rel=0.03)
    else:
        assert dla.fp16_tflops is None  # NVIDIA publishes none


@every_profile()
def test_bandwidth_is_bus_width_times_both_edges_of_the_clock(profile: Profile) -> None:
    memory = profile.memory
    if memory.bus_bits is None or memory.max_mhz is None:
        assert profile.name in {"agx-thor", "t4000", "h200", "laptop"}
        return
    gbps = memory.bus_bits.value / 8 * memory.max_mhz.value * 2 / 1e3
    assert memory.bandwidth_gbps.value == pytest.approx(gbps, rel=0.01)


@pytest.mark.parametrize(
    ("name", "cores"),
    [
        ("jetson-nano", 0), ("tx2", 0), ("tx2-nx", 0), ("orin-nano-4gb", 0),
        ("orin-nano-8gb-super", 0), ("agx-thor", 0), ("t4000", 0), ("h200", 0), ("laptop", 0),
        ("orin-nx-8gb", 1), ("orin-nx-16gb", 2), ("agx-orin-64gb", 2), ("xavier-nx-8gb", 2),
        ("agx-xavier-32gb", 2),
    ],
)  # fmt: skip
def test_dla_cores_are_those_that_the_silicon_has(name: str, cores: int) -> None:
    assert SHIPPED[name].dla_cores == cores


@every_profile()
def test_no_power_mode_has_more_than_the_module(profile: Profile) -> None:
    ghost = [mode.name for mode in profile.power_modes if (mode.dla_cores or 0) > profile.dla_cores]
    assert ghost == []
    for mode in profile.power_modes:
        assert profile.gpu is not None
        # nvpmodel prints 1301 where the datasheet has 1300.5.
        assert (mode.gpu_max_mhz or 0) <= profile.gpu.max_mhz.value * 1.001
        if profile.memory.max_mhz:
            assert (mode.emc_max_mhz or 0) <= profile.memory.max_mhz.value * 1.001


@every_profile()
def test_a_jetpack_of_a_profile_knows_its_gpu(profile: Profile) -> None:
    for version in profile.jetpacks:
        assert profile.sm in find_jetpack(version).cuda_archs, version


def test_power_modes_are_found_by_name_whatever_its_case() -> None:
    assert SHIPPED["orin-nx-16gb"].power_mode("maxn").gpu_max_mhz == 918


def test_a_missing_power_mode_names_those_there_are() -> None:
    with pytest.raises(ProfileError, match="10W, 15W, 25W, MAXN"):
        SHIPPED["orin-nx-16gb"].power_mode("90W")


def test_an_unknown_profile_suggests_the_nearest() -> None:
    with pytest.raises(ProfileError, match=r"use one of orin-nx-16gb, "):
        load_profile("orin-nx16gb")


def test_a_profile_of_ones_own_is_loaded_from_its_path(tmp_path: Path) -> None:
    path = own_profile(tmp_path, 'name = "orin-nx-16gb"', 'name = "mine"')
    assert load_profile(path).name == "mine"
    assert load_profile(str(path)).dla_cores == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'arch = "Ampere"',
            'archh = "Ampere"',
            r"mine\.toml: unknown key 'archh' in \[gpu\]: use one of arch,",
        ),
        ('soc = "T234"', 'soc = "T234"\nsocket = 1', r"mine\.toml.*socket"),
        ('generation = "v2"', 'generation = "v9"', r"dla\.generation is 'v9': use one of v1, v2"),
        ("sm = 87", 'sm = "87"', r"gpu\.sm is wrong: expected `int`, got `str`"),
        ("value = 102.4", "value = 0", r"memory\.bandwidth_gbps is 0"),
        ("value = 102.4", "value = nan", r"memory\.bandwidth_gbps is nan"),
        ('name = "25W"', 'name = "maxn"', "two power modes"),
        ('name = "orin-nx-16gb"', "name = ", r"mine\.toml"),
    ],
)
def test_a_wrong_profile_is_refused_with_its_file_and_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    with pytest.raises(ProfileError, match=message):
        load_profile(own_profile(tmp_path, old, new))


def test_a_missing_profile_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"none\.toml cannot be read"):
        load_profile(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("version", "era"),
    [
        ("7.1.3", "calibration-cache"), ("8.5.2.2", "calibration-cache"),
        ("10.3.0", "calibration-cache"), ("10.7.0", "calibration-cache"), ("10.8", "none"),
        ("10.16.2", "none"), ("11.3.1", "none"), ("11.4.0", "none"), ("11.4", "none"),
        ("11.4.1", "qdq"), ("12.0", "qdq"),
    ],
)  # fmt: skip
def test_tensorrt_takes_dla_scales_by_its_era(version: str, era: str) -> None:
    assert dla_era(version) == era


def test_a_tensorrt_version_that_is_none_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"10\.3\.0"):
        dla_era("10.3-rc")


def test_jetpacks_are_unique_in_order_and_sourced() -> None:
    versions = [jetpack.version for jetpack in JETPACKS]
    assert len(set(versions)) == len(versions)
    assert versions == sorted(versions, key=lambda v: [*map(int, v.removesuffix(" DP").split("."))])
    releases = [l4t for jetpack in JETPACKS for l4t in jetpack.l4t]
    assert len(set(releases)) == len(releases)
    for jetpack in JETPACKS:
        assert set(jetpack.source.split(";")) <= set(SOURCES), jetpack.version


def test_dla_of_orin_works_with_jetpack_6_and_7_2_2_but_not_between() -> None:
    orin = [find_jetpack(version) for version in SHIPPED["agx-orin-64gb"].jetpacks]
    eras = {jetpack.version: dla_era(jetpack.tensorrt) for jetpack in orin}
    assert eras["6.2"] == "calibration-cache"
    assert eras["7.2"] == eras["7.2.1"] == "none"
    assert eras["7.2.2"] == "qdq"


def test_an_unknown_jetpack_names_those_there_are() -> None:
    with pytest.raises(ProfileError, match=r"6\.2\.2"):
        find_jetpack("6.9")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("agx-thor", "No DLA: everything runs on the GPU"),
        ("laptop", "runs on the CPU"),
        ("jetson-nano", "no INT8 path"),
        ("orin-nx-16gb", "JetPack 7.2 to 7.2.1 (TensorRT 10.16.2): TensorRT has no DLA here"),
        ("agx-xavier-32gb", "calibration cache"),
        ("xavier-nx-8gb", "Python 3.8 at most"),
    ],
)
def test_consequences_say_what_a_module_means_for_a_build(name: str, line: str) -> None:
    assert any(line in sentence for sentence in consequences(SHIPPED[name], JETPACKS))


def test_the_list_names_every_profile() -> None:
    result = CliRunner().invoke(profiles)
    assert result.exit_code == 0
    assert [name for name in SHIPPED if name not in result.output] == []


def test_the_list_as_json_is_the_profiles() -> None:
    result = CliRunner().invoke(profiles, ["--json"])
    listed = {entry["name"]: entry for entry in json.loads(result.output)}
    assert listed.keys() == SHIPPED.keys()
    assert listed["orin-nx-16gb"]["gpu"]["int8_tops"]["value"] == 30


@every_profile()
def test_every_profile_can_be_explained(profile: Profile) -> None:
    result = CliRunner().invoke(profiles, ["show", profile.name])
    assert result.exit_code == 0, result.output
    for key, figure in figures(profile):
        assert key in result.output
        for source in figure.source.split(";"):
            assert f"\n{source}: {SOURCES[source].title}" in result.output


def test_one_profile_as_json_is_that_profile() -> None:
    result = CliRunner().invoke(profiles, ["show", "agx-thor", "--json"])
    assert json.loads(result.output)["dla"] is None
