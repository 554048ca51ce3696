"""The clocks of the DLA's array: closed forms against a walk through the sequence, known counts."""

import random
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
from dla_layers import as_convolution, workbook_rows

from toolkit.dla.cycles import sequence
from toolkit.dla.cycles.configurations import CONFIGURATIONS, Config
from toolkit.dla.cycles.estimate import all_modes, estimate
from toolkit.dla.cycles.layers import ConvLayer, LayerError
from toolkit.dla.cycles.result import Cycles
from toolkit.dla.cycles.sources import source_of

FULL = CONFIGURATIONS["nv_full"]
RESNET = [as_convolution(row) for row in workbook_rows("ResNet50")]


def by_mode(layer: ConvLayer, config: Config = FULL) -> dict[str, Cycles]:
    return {cycles.mode: cycles for cycles in all_modes(layer, config)}


# The walk: the sequencer's counters, one package at a time, written from the description alone.


def walked_stripes(positions: int, config: Config, batch: int) -> Iterator[int]:
    lower, upper = {
        1: (config.stripe, 2 * config.stripe),
        2: (8, 16),
        3: (8, 16),
        **dict.fromkeys(range(4, 8), (4, 8)),
        **dict.fromkeys(range(8, 16), (2, 4)),
        **dict.fromkeys(range(16, 33), (1, 1)),
    }[batch]
    done = 0
    while done < positions:
        if config.long_stripes and done + 2 * upper <= positions:
            step = upper
        elif done + upper >= positions:
            step = positions - done
        else:
            step = lower
        yield step
        done += step


def walked_image_stripes(rows: int, columns: int, config: Config, joined: int) -> Iterator[int]:
    for _ in range(rows):
        remaining = columns
        while remaining > 0:
            step = min(remaining, config.image_stripe)
            yield (step + joined - 1) // joined * joined
            remaining -= step


def walked_cycles(
    stripes: list[int],
    kernel: tuple[int, int],
    channels: int,
    kernels: int,
    config: Config,
    fp16: bool,
) -> int:
    """Group > stripe > block of channels > row > column, each package as long as its longest."""
    at_once = config.atomic_k_fp16 if fp16 else config.atomic_k
    cycles = 0
    for first in range(0, kernels, at_once):
        size = min(at_once, kernels - first)
        weights = (size + 1) // 2 if config.name == "nv_full" and not fp16 else size
        for stripe in stripes:
            for _ in range(0, channels, config.atomic_c):
                for _ in range(kernel[0]):
                    for _ in range(kernel[1]):
                        cycles += max(stripe, config.package_minimum, weights)
    return cycles


@pytest.mark.parametrize("name", ["nv_full", "nv_large", "nv_medium_512", "nv_small"])
def test_direct_convolution_is_the_walk_through_its_packages(name: str) -> None:
    config = CONFIGURATIONS[name]
    chance = random.Random()
    for _ in range(120):
        batch = chance.choice([1, 1, chance.randint(2, 32)]) if config.max_batch > 1 else 1
        fp16 = bool(config.atomic_k_fp16) and chance.random() < 0.3
        positions = chance.choice([1, chance.randint(1, 80), chance.randint(1, 700)])
        kernel = (chance.randint(1, 4), chance.randint(1, 4))
        channels, kernels = chance.randint(1, 200), chance.randint(1, 100)
        stripes = [step * batch for step in walked_stripes(positions, config, batch)]
        ours = sequence.direct(
            positions,
            kernel[0] * kernel[1] * -(-channels // config.atomic_c),
            kernels,
            config=config,
            precision="fp16" if fp16 else "int8",
            batch=batch,
        )
        case = (positions, kernel, channels, kernels, batch, fp16)
        assert ours.cycles == walked_cycles(stripes, kernel, channels, kernels, config, fp16), case
        assert max(ours.data, ours.weights) <= ours.cycles


@pytest.mark.parametrize("name", ["nv_full", "nv_large", "nv_medium_512", "nv_small"])
def test_image_convolution_is_the_walk_through_its_lines(name: str) -> None:
    config = CONFIGURATIONS[name]
    chance = random.Random()
    for _ in range(80):
        rows, columns = chance.randint(1, 30), chance.randint(1, 300)
        joined = chance.choice([1, 2, 4])
        packages, kernels = chance.randint(1, 12), chance.randint(1, 100)
        stripes = list(walked_image_stripes(rows, columns, config, joined))
        ours = sequence.image(
            rows,
            columns,
            packages,
            kernels,
            config=config,
            precision="int8",
            joined=joined,
        )
        walked = walked_cycles(stripes, (packages, 1), 1, kernels, config, fp16=False)
        assert ours.cycles == walked, (rows, columns, joined, packages, kernels)


def test_stripes_are_sixteen_until_the_last_of_seventeen_to_thirty_two() -> None:
    assert sequence.direct_stripes(1, FULL) == [(1, 1)]
    assert sequence.direct_stripes(32, FULL) == [(32, 1)]
    assert sequence.direct_stripes(33, FULL) == [(16, 1), (17, 1)]
    assert sequence.direct_stripes(49, FULL) == [(16, 2), (17, 1)]
    assert sequence.direct_stripes(40, FULL, batch=4) == [(4, 8), (8, 1)]
    assert sequence.direct_stripes(3, FULL, batch=16) == [(1, 2), (1, 1)]
    large = CONFIGURATIONS["nv_large"]
    assert sequence.direct_stripes(127, large) == [(32, 2), (63, 1)]
    assert sequence.direct_stripes(128, large) == [(64, 1), (64, 1)]


def test_full_stripes_and_groups_make_the_well_known_product() -> None:
    chance = random.Random()
    for _ in range(50):
        rows, columns = chance.randint(4, 60), chance.randint(4, 60)
        blocks, groups, kernel = chance.randint(1, 5), chance.randint(1, 5), chance.randint(1, 5)
        ours = sequence.direct(
            rows * columns,
            kernel * kernel * blocks,
            32 * groups,
            config=FULL,
            precision="int8",
        )
        assert ours.cycles == rows * columns * kernel * kernel * blocks * groups


# Known counts of the open hardware.


def test_the_first_layer_of_resnet_in_its_three_modes() -> None:
    first = as_convolution(workbook_rows("ResNet50")[0], image=True)
    modes = by_mode(first)
    assert {mode: cycles.mac for mode, cycles in modes.items()} == {
        "direct": 1_229_312,
        "image": 175_616,
        "image, 2 rows joined": 100_352,
    }
    assert estimate(first, FULL).mode == "image, 2 rows joined"
    assert set(by_mode(replace(first, image=False))) == {"direct"}
    assert set(by_mode(replace(first, dilation=(2, 2)))) == {"direct"}


@pytest.mark.parametrize(
    ("channels", "width", "stride", "rows"),
    [
        (4, 4, 4, {1, 2, 4}),
        (3, 5, 1, {1, 2}),
        (3, 1, 5, {1, 2}),
        (3, 8, 8, {1, 2}),
        (3, 9, 1, {1}),
        (4, 1, 9, {1}),
        (1, 16, 1, {1, 2, 4}),
        (1, 17, 1, {1, 2}),
        (2, 3, 1, set()),
    ],
)
def test_rows_are_joined_where_few_channels_leave_room(
    channels: int, width: int, stride: int, rows: set[int]
) -> None:
    layer = ConvLayer(
        channels=channels,
        height=64,
        width=64,
        kernels=32,
        kernel=(3, width),
        stride=(1, stride),
        image=True,
    )
    modes = {1: "image", 2: "image, 2 rows joined", 4: "image, 4 rows joined"}
    assert set(by_mode(layer)) == {"direct"} | {modes[row] for row in rows}


@pytest.mark.parametrize("config", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_rows_that_are_joined_fit_one_atom_of_the_array(channels: int, config: Config) -> None:
    stored = 1 if channels == 1 else 4
    for columns in range(1, 12):
        layer = ConvLayer(
            channels=channels, height=64, width=64, kernels=32, kernel=(3, columns), image=True
        )
        for cycles in all_modes(layer, config):
            rows = int(cycles.mode.split()[1]) if "joined" in cycles.mode else 1
            assert rows == 1 or stored * columns * rows <= config.atomic_c


def test_resnet_50_takes_three_million_clocks_of_the_array() -> None:
    layers = [estimate(layer, FULL) for layer in RESNET]
    assert sum(layer.mac for layer in layers) == pytest.approx(3.09e6, abs=0.005e6)
    bound = sum(max(layer.mac, layer.output_stage) for layer in layers)
    assert bound == pytest.approx(3.19e6, abs=0.005e6)
    assert sum(layer.macs for layer in layers) / 2048 == pytest.approx(1.90e6, abs=0.005e6)


def test_a_narrow_1x1_convolution_waits_for_the_output_stage() -> None:
    branch = next(r for r in workbook_rows("ResNet50") if r["layer"].startswith("Res2a_branch2c"))
    cycles = estimate(replace(as_convolution(branch), eltwise=None), replace(FULL, port_bytes=512))
    assert (cycles.mac, cycles.output_stage) == (25_088, 50_176)
    assert cycles.bound_by == "output stage"


def test_a_fully_connected_layer_runs_at_a_sixteenth() -> None:
    layer = ConvLayer(channels=2048, height=1, width=1, kernels=1024)
    cycles = estimate(layer, replace(FULL, port_bytes=4096))
    assert cycles.mac == 16 * 32 * 32
    assert cycles.macs / 2048 / cycles.mac == 1 / 16
    assert cycles.bound_by == "weights streaming"
    assert estimate(layer, FULL).bound_by == "memory"


def test_frames_of_a_fully_connected_layer_share_their_weights() -> None:
    layer = ConvLayer(channels=2048, height=1, width=1, kernels=1024, batch=16)
    together = estimate(layer, FULL)
    assert together.mode == "direct, 16 frames together"
    assert together.mac == 16 * 32 * 32
    turns = by_mode(layer)["direct"]
    assert turns.mac == 16 * together.mac
    # All weights (2 MiB) do not fit the buffer: each turn reads them.
    assert turns.bytes_refetched == 15 * 2048 * 1024
    assert set(by_mode(layer, CONFIGURATIONS["nv_large"])) == {"direct"}
    odd = estimate(replace(layer, batch=33), FULL)
    assert odd.mac == 32 * 32 * 32 + 16 * 32 * 32


def test_floating_point_halves_the_kernels_of_a_group() -> None:
    layer = ConvLayer(channels=128, height=28, width=28, kernels=128, kernel=(3, 3), pads=(1,) * 4)
    int8, fp16 = (estimate(replace(layer, precision=p), FULL) for p in ("int8", "fp16"))
    assert fp16.mac == 2 * int8.mac
    with pytest.raises(LayerError, match="nv_large has no fp16"):
        estimate(replace(layer, precision="fp16"), CONFIGURATIONS["nv_large"])


def test_winograd_saves_nine_quarters() -> None:
    layer = ConvLayer(channels=128, height=56, width=56, kernels=64, kernel=(3, 3), pads=(1,) * 4)
    modes = by_mode(layer, replace(FULL, uses_winograd=True))
    assert modes["direct"].mac / modes["Winograd"].mac == 2.25
    assert "Winograd" not in by_mode(layer)
    assert "Winograd" not in by_mode(layer, replace(CONFIGURATIONS["nv_large"], uses_winograd=True))
    assert "Winograd" not in by_mode(
        replace(layer, dilation=(2, 2)), replace(FULL, uses_winograd=True)
    )


@pytest.mark.parametrize(
    ("mode", "efficiency"), [("dense", 1 / 512), ("slices", 1 / 64), ("group by group", 1 / 2048)]
)
def test_depthwise_convolution_has_no_hardware(mode: str, efficiency: float) -> None:
    layer = ConvLayer(
        channels=512, height=14, width=14, kernels=512, kernel=(3, 3), pads=(1,) * 4, groups=512
    )
    cycles = by_mode(layer)[mode]
    assert cycles.macs == 14 * 14 * 9 * 512
    assert cycles.macs / 2048 / cycles.mac == pytest.approx(efficiency)
    assert estimate(layer, FULL).mode == "slices"


def test_groups_are_cut_where_atoms_end() -> None:
    layer = ConvLayer(channels=96, height=14, width=14, kernels=192, kernel=(3, 3), groups=8)
    # 12 channels and 24 kernels a group: 8 groups are the fewest that fill whole atoms of 32.
    assert set(by_mode(layer)) == {"dense", "group by group"}
    assert set(by_mode(replace(layer, channels=512, kernels=512))) == {"dense", "group by group"}
    thin = replace(layer, channels=192, kernels=192, groups=12)
    modes = by_mode(thin)
    assert set(modes) == {"dense", "slices", "group by group"}
    alone = estimate(replace(thin, channels=32, kernels=32, groups=1), FULL)
    assert modes["slices"].mac == 6 * alone.mac


def test_a_unit_for_depthwise_takes_its_channels_at_once() -> None:
    layer = ConvLayer(channels=64, height=9, width=9, kernels=64, kernel=(3, 3), groups=64)
    unit = by_mode(layer, replace(FULL, depthwise_channels=32))["depthwise unit"]
    assert unit.mac == 7 * 7 * 9 * 2
    assert unit.bytes_read == 64 * 9 * 9 + 640 + 64 * 4  # weights end at a multiple of 128


# The table of configurations.


@pytest.mark.parametrize(
    ("name", "macs", "buffer_kib"),
    [
        ("nv_full", 2048, 512),
        ("nv_large", 2048, 512),
        ("nv_medium_1024_full", 1024, 512),
        ("nv_medium_512", 512, 512),
        ("nv_small_256", 256, 128),
        ("nv_small_256_full", 256, 128),
        ("nv_small", 64, 128),
        ("xavier", 2048, 512),
    ],
)
def test_arrays_and_buffers_have_the_published_sizes(name: str, macs: int, buffer_kib: int) -> None:
    config = CONFIGURATIONS[name]
    assert config.atomic_c * config.kernels_at_once("int8") == macs
    assert config.banks * config.bank_bytes == buffer_kib * 1024


def test_orin_has_the_macs_that_its_published_rate_needs() -> None:
    orin = CONFIGURATIONS["orin"]
    # 105 sparse TOPS of both cores at 1.6 GHz, half of it dense, two operations a MAC.
    macs = orin.atomic_c * orin.kernels_at_once("int8")
    assert macs == pytest.approx(105e12 / 2 / 2 / 2 / 1.6e9, rel=0.01)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_figure_has_a_source(name: str) -> None:
    for field in fields(Config):
        assert source_of(name, field.name).text


def inferred_fields(name: str) -> list[str]:
    names = [field.name for field in fields(Config)]
    return [field for field in names if source_of(name, field).certainty == "inferred"]


def test_guesses_are_marked() -> None:
    free = {"mac_efficiency", "memory_efficiency", "overlap", "uses_winograd"}
    assert set(inferred_fields("nv_full")) == free
    every = {field.name for field in fields(Config)}
    certain = {"name", "generation", "split_weight_banks"}
    assert every - set(inferred_fields("orin")) == certain
    assert every - set(inferred_fields("xavier")) == certain | {"depthwise_channels"}
    with pytest.raises(KeyError):
        source_of("nv_full", "colour")


def test_xavier_counts_like_nv_full() -> None:
    xavier = CONFIGURATIONS["xavier"]
    assert [estimate(layer, xavier) for layer in RESNET] == [
        estimate(layer, FULL) for layer in RESNET
    ]
