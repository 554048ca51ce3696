"""The first cost model: right order of magnitude, and monotone in work, bytes and precision."""

import pytest
from planning_graphs import constant, one_node

from device.profile import load_profile
from toolkit.importer import import_model
from toolkit.passes import run_passes
from toolkit.planning.costs import crossing_us, load_costs, predicted_us, tensor_bytes
from toolkit.planning.node_view import NodeView, TensorView, views

ORIN = load_profile("agx-orin-64gb")
XAVIER = load_profile("agx-xavier-32gb")


def conv(maps: int = 512, group: int = 1, width: int = 64) -> NodeView:
    operands = [(1, 512, width, width), constant(maps, 512 // group, 3, 3)]
    return one_node("Conv", operands, (1, maps, width, width), group=group, pads=[1] * 4)


def total(path, profile, processor, precision) -> float:
    model, _ = run_passes(import_model(path).model)
    return sum(predicted_us(v, processor, profile, precision) for v in views(model.graph))


@pytest.mark.parametrize(
    ("network", "where", "measured_us"),
    [
        ("resnet50", (ORIN, "gpu", "int8"), 1013),  # batch 1, TensorRT 10.3, one source
        ("resnet50", (ORIN, "gpu", "fp16"), 1029),
        ("resnet50", (ORIN, "dla0", "int8"), 1278),
        ("resnet50", (ORIN, "dla0", "fp16"), 17734),
        ("resnet50", (load_profile("orin-nano-8gb-super"), "gpu", "int8"), 1190),
        ("inception_v1", (XAVIER, "dla0", "fp16"), 3656),  # HaX-CoNN
    ],
)
def test_published_latencies_are_met_within_a_factor_of_two(
    network, where, measured_us, light_models
):
    predicted = total(light_models / f"light_{network}.onnx", *where)
    assert measured_us / 2 < predicted < measured_us * 2


def test_more_work_takes_longer_on_every_processor():
    for processor in ("gpu", "dla0", "cpu"):
        small, large = (predicted_us(conv(maps), processor, ORIN, "int8") for maps in (512, 4096))
        assert large > 2 * small


def test_a_lower_precision_is_not_slower():
    for processor in ("gpu", "dla0"):
        fp16, int8 = (predicted_us(conv(), processor, ORIN, p) for p in ("fp16", "int8"))
        assert int8 < fp16


def test_fp16_convolutions_run_at_a_sixteenth_on_the_dla_of_orin():
    int8 = predicted_us(conv(4096), "dla0", ORIN, "int8")
    fp16 = predicted_us(conv(4096), "dla0", ORIN, "fp16")
    overhead = load_costs().dla.node_us.value
    assert (fp16 - overhead) / (int8 - overhead) == pytest.approx(16)


def test_fp16_convolutions_run_at_half_on_the_dla_of_xavier():
    int8 = predicted_us(conv(4096), "dla0", XAVIER, "int8")
    fp16 = predicted_us(conv(4096), "dla0", XAVIER, "fp16")
    overhead = load_costs().dla.node_us.value
    assert (fp16 - overhead) / (int8 - overhead) == pytest.approx(2, rel=0.01)


def test_pointwise_work_costs_its_bytes():
    alone = one_node("Relu", [(1, 64, 512, 512)], (1, 64, 512, 512))
    moved = 2 * 64 * 512 * 512
    costs = load_costs().gpu
    expected = costs.node_us.value + 1e6 * moved / (204.8e9 * costs.bandwidth_efficiency.value)
    assert predicted_us(alone, "gpu", ORIN, "int8") == pytest.approx(expected)


def test_an_activation_behind_a_convolution_is_free():
    behind = one_node("Relu", [(1, 8, 64, 64)], (1, 8, 64, 64), before="Conv")
    behind_pool = one_node("Relu", [(1, 8, 64, 64)], (1, 8, 64, 64), before="MaxPool")
    assert predicted_us(behind, "gpu", ORIN, "int8") == 0
    assert predicted_us(behind_pool, "gpu", ORIN, "int8") > 0


def test_depthwise_convolutions_use_the_arrays_badly():
    per_mac = [
        predicted_us(conv(512, group, 256), "dla0", ORIN, "int8")
        / (conv(512, group, 256).macs or 1)
        for group in (1, 512)
    ]
    assert per_mac[1] > 8 * per_mac[0]


def test_a_node_of_unknown_shape_costs_its_launch():
    unknown = one_node("Relu", [None], None)
    assert predicted_us(unknown, "gpu", ORIN, "int8") == load_costs().gpu.node_us.value


def test_a_crossing_costs_its_switch_and_its_bytes():
    switch = load_costs().crossing.us.value
    assert crossing_us(0, ORIN) == switch
    assert crossing_us(204_800_000, ORIN) == pytest.approx(switch + 2000)


def test_a_processor_that_the_profile_lacks_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="has no dla0"):
        predicted_us(conv(), "dla0", load_profile("orin-nano-8gb"), "int8")


def test_sizes_follow_the_precision_for_floats_only():
    image = TensorView("x", "float32", (1, 3, 2, 2))
    assert [tensor_bytes(image, p) for p in ("fp32", "fp16", "int8")] == [48, 24, 12]
    assert tensor_bytes(TensorView("i", "int64", (1, 3)), "int8") == 24
    assert tensor_bytes(TensorView("u", "float32", None), "int8") is None


def test_every_constant_has_a_source():
    costs = load_costs()
    for group in (costs.gpu, costs.dla, costs.cpu, costs.crossing):
        for field in group.__struct_fields__:
            figure = getattr(group, field)
            assert figure.value > 0
            assert len(figure.source) > 10
