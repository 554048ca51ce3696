"""Operators that move numbers, in Triton's interpreter, against onnxruntime."""

from collections.abc import Mapping
from dataclasses import replace

import gpu_interpreter
import numpy as np
import onnx
import pytest
from gpu_graphs import Case, ints, node, normal
from onnx.reference import ReferenceEvaluator

from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.view import View, like

pytest.importorskip("triton", reason="Triton is not installed")

COPIES = {
    "elementwise",
    "transpose_tiles",
    "pad",
    "space_to_depth",
}  # a border may widen its channels


def agree(case: Case, feeds: Mapping[str, np.ndarray], precision: str = "fp32") -> None:
    """Compare: exactly where numbers are only moved, in FP16 to its rounding."""
    outputs = gpu_interpreter.run(case.lower(precision), feeds)
    for name, truth in case.truth(feeds).items():
        assert outputs[name].shape == truth.shape
        assert outputs[name].dtype == truth.dtype
        if precision == "fp32" or truth.dtype.kind != "f":
            np.testing.assert_array_equal(outputs[name], truth)
        else:
            np.testing.assert_allclose(outputs[name], truth, rtol=1e-3, atol=1e-3)


def close(case: Case, feeds: Mapping[str, np.ndarray], rel: float = 1e-5) -> None:
    outputs = gpu_interpreter.run(case.lower(), feeds)
    for name, truth in case.truth(feeds).items():
        np.testing.assert_allclose(outputs[name], truth, rtol=rel, atol=rel)


def floats(rng: np.random.Generator, case: Case) -> dict[str, np.ndarray]:
    return {n: rng.normal(size=s).astype(np.float32) for n, s in case.inputs.items()}


SLICES = {
    "a part": (ints(1, 2), ints(3, 5), None, None),
    "steps": (ints(0, 1), ints(9, 9), ints(1, 2), ints(2, 3)),
    "backwards": (ints(-1, 4), ints(-99, 0), ints(0, 2), ints(-1, -2)),
    "negative axes": (ints(1), ints(-1), ints(-2), ints(1)),
    "beyond the ends": (ints(-99), ints(99), ints(2), ints(1)),
}


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
@pytest.mark.parametrize("name", SLICES)
def test_slices(name: str, dtype: str, rng: np.random.Generator) -> None:
    names = ("starts", "ends", "axes", "steps")
    weights = {n: v for n, v in zip(names, SLICES[name], strict=True) if v is not None}
    case = Case(
        [node("Slice", " ".join(("x", *weights)), "y")],
        {"x": (4, 6, 7)},
        weights,
        dtypes={"x": dtype, "y": dtype},
    )
    agree(case, {"x": (rng.normal(size=(4, 6, 7)) * 9).astype(dtype)})
    assert len(case.lower().launches) == 1


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_slice_of_channels_is_read_where_it_lies(
    precision: str, rng: np.random.Generator
) -> None:
    nodes = [
        node("Conv", "x v", "c"),
        node("Slice", "c starts ends axes", "s"),
        node("Conv", "s w", "y"),
    ]
    weights = {"starts": ints(3), "ends": ints(8), "axes": ints(1)}
    weights |= {"v": normal(rng, 10, 4, 1, 1), "w": normal(rng, 6, 5, 3, 3)}
    case = Case(nodes, {"x": (2, 4, 6, 6)}, weights)
    kernels = [call.spec.title for call in case.lower(precision).launches]
    assert sum(kernel in COPIES for kernel in kernels) == 2  # the borders


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_splits(axis: int, rng: np.random.Generator) -> None:
    split = node("Split", "x parts", "a", axis=axis)
    split.output.append("b")
    nodes = [split, node("Neg", "a", "y"), node("Abs", "b", "z")]
    size = (4, 6, 8)[axis]
    case = Case(nodes, {"x": (4, 6, 8)}, {"parts": ints(1, size - 1)}, ("y", "z"))
    agree(case, floats(rng, case))
    assert len(case.lower().launches) == 2


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_expanding_and_tiling(dtype: str, rng: np.random.Generator) -> None:
    nodes = [node("Expand", "x shape", "e"), node("Tile", "e repeats", "y")]
    weights = {"shape": ints(2, 3, 1, 5), "repeats": ints(1, 2, 3, 1)}
    case = Case(nodes, {"x": (3, 1, 5)}, weights, dtypes={"x": dtype, "y": dtype})
    agree(case, {"x": rng.integers(0, 99, (3, 1, 5)).astype(dtype)})


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
@pytest.mark.parametrize("after_conv", [False, True])
def test_depth_to_space(mode: str, after_conv: bool, rng: np.random.Generator) -> None:
    nodes = [node("DepthToSpace", "x", "y", blocksize=2, mode=mode)]
    weights = {}
    if after_conv:  # channels lie last then
        nodes = [node("Conv", "u w", "x"), *nodes]
        weights["w"] = normal(rng, 12, 3, 1, 1)
    case = Case(nodes, {"u": (2, 3, 3, 5)} if after_conv else {"x": (2, 12, 3, 5)}, weights)
    close(case, floats(rng, case))


def test_space_to_depth(rng: np.random.Generator) -> None:
    case = Case([node("SpaceToDepth", "x", "y", blocksize=2)], {"x": (2, 3, 4, 6)}, {})
    agree(case, floats(rng, case))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_shuffle_of_channels_is_one_copy(precision: str, rng: np.random.Generator) -> None:
    nodes = [
        node("Conv", "x v", "c"),
        node("Reshape", "c split", "r"),
        node("Transpose", "r", "t", perm=[0, 2, 1, 3, 4]),
        node("Reshape", "t whole", "s"),
        node("Conv", "s w", "y"),
    ]
    weights = {"split": ints(2, 2, 6, 5, 5), "whole": ints(2, 12, 5, 5)}
    weights |= {"v": normal(rng, 12, 4, 1, 1), "w": normal(rng, 6, 12, 3, 3)}
    case = Case(nodes, {"x": (2, 4, 5, 5)}, weights)
    kernels = [call.spec.title for call in case.lower(precision).launches]
    assert sum(kernel in COPIES for kernel in kernels) == 3  # and the borders


def test_patches_become_rows_without_a_copy(rng: np.random.Generator) -> None:
    nodes = [
        node("Conv", "x v", "c", strides=[2, 2]),
        node("Reshape", "c rows", "r"),
        node("Transpose", "r", "t", perm=[0, 2, 1]),
        node("MatMul", "t w", "y"),
    ]
    weights = {"rows": ints(2, 16, -1), "v": normal(rng, 16, 3, 2, 2), "w": normal(rng, 16, 5)}
    case = Case(nodes, {"x": (2, 3, 8, 8)}, weights)
    kernels = [call.spec.title for call in case.lower().launches]
    assert sum(kernel in COPIES for kernel in kernels) == 1  # the border
    close(case, floats(rng, case), rel=1e-4)


@pytest.mark.parametrize("trial", range(30))
def test_reshaping_of_any_view_agrees_with_numpy(trial: int, rng: np.random.Generator) -> None:
    for _ in range(30):
        rank = int(rng.integers(1, 5))
        base = np.arange(5**rank).reshape((5,) * rank)
        steps = tuple(slice(None, None, int(s)) for s in rng.integers(1, 4, rank))
        array = base[steps].transpose(rng.permutation(rank))
        remaining, shape = array.size, []
        while remaining > 1:
            shape.append(
                int(rng.choice([n for n in range(1, remaining + 1) if remaining % n == 0]))
            )
            remaining //= shape[-1]
        view = View("b", "int64", array.shape, tuple(s // 8 for s in array.strides))
        result = view.reshaped(tuple(shape))
        try:
            array.view().shape = tuple(shape)
        except AttributeError:  # numpy, too, would copy
            assert result is None
            continue
        assert result is not None
        strides = tuple(8 * s for s in result.strides)
        seen = np.lib.stride_tricks.as_strided(array, tuple(shape), strides)
        np.testing.assert_array_equal(seen, array.reshape(shape))


PADS = {
    "constant": {},
    "edge": {"mode": "edge"},
    "reflect": {"mode": "reflect"},
    "wrap": {"mode": "wrap"},
}


@pytest.mark.parametrize("name", PADS)
@pytest.mark.parametrize("widths", [(0, 0, 1, 2, 0, 0, 3, 1), (1, 2, 0, 1, 0, 1, 2, 0)])
def test_pads(name: str, widths: tuple[int, ...], rng: np.random.Generator) -> None:
    weights = {"widths": ints(*widths), "value": np.array(1.5, np.float32)}
    inputs = "x widths value" if name == "constant" else "x widths"
    used = {n: v for n, v in weights.items() if n in inputs.split()}
    case = Case([node("Pad", inputs, "y", **PADS[name])], {"x": (2, 4, 5, 6)}, used)
    agree(case, floats(rng, case))


def test_a_pad_may_take_away(rng: np.random.Generator) -> None:
    case = Case([node("Pad", "x w", "y")], {"x": (4, 6)}, {"w": ints(-1, 2, 0, -3)})
    agree(case, floats(rng, case))


def test_a_pad_of_integers(rng: np.random.Generator) -> None:
    weights = {"w": ints(0, 1, 2, 0), "v": np.array(-7)}
    dtypes = {"x": "int64", "y": "int64"}
    case = Case([node("Pad", "x w v", "y")], {"x": (3, 4)}, weights, dtypes=dtypes)
    agree(case, {"x": rng.integers(-(2**60), 2**60, (3, 4))})


def test_a_border_of_zeros_is_part_of_a_convolution(rng: np.random.Generator) -> None:
    nodes = [node("Pad", "x p", "b"), node("Conv", "b w", "y", pads=[1, 0, 0, 0])]
    weights = {"p": ints(0, 0, 0, 1, 0, 0, 2, 1), "w": normal(rng, 6, 3, 3, 3)}
    case = Case(nodes, {"x": (1, 3, 6, 6)}, weights)
    kernels = [call.spec.title for call in case.lower().launches]
    assert sum(kernel in COPIES for kernel in kernels) == 2  # the borders of the segment
    close(case, floats(rng, case), rel=1e-4)


def test_growing_concatenations_copy_nothing(rng: np.random.Generator) -> None:
    nodes = [node("Conv", "x w0", "c0")]
    weights = {"w0": normal(rng, 6, 3, 1, 1)}
    parts = ["c0"]
    for at in range(1, 4):
        weights[f"w{at}"] = normal(rng, 4, 6 + 4 * (at - 1), 3, 3)
        nodes += [
            node("Concat", " ".join(parts), f"j{at}", axis=1),
            node("Conv", f"j{at} w{at}", f"c{at}", pads=[1, 1, 1, 1]),
        ]
        parts.append(f"c{at}")
    nodes += [node("Concat", " ".join(parts), "j", axis=1), node("Relu", "j", "y")]
    case = Case(nodes, {"x": (2, 3, 5, 5)}, weights)
    kernels = [call.spec.title for call in case.lower().launches]
    assert sum(kernel in COPIES for kernel in kernels) == 2  # the border, and Relu
    close(case, floats(rng, case), rel=1e-4)


@pytest.mark.parametrize("axis", [1, 2])
def test_chains_write_into_a_concatenation(axis: int, rng: np.random.Generator) -> None:
    nodes = [
        node("Sigmoid", "a", "s"),
        node("Exp", "b", "e"),
        node("Concat", "s e", "y", axis=axis),
    ]
    shapes = [[2, 3, 4], [2, 3, 4]]
    shapes[1][axis] = 5
    case = Case(nodes, {"a": tuple(shapes[0]), "b": tuple(shapes[1])}, {})
    assert len(case.lower("fp16").launches) == 2
    close(case, floats(rng, case))


@pytest.mark.parametrize("indices", [ints(2, 0, -1), ints(1, 3, 5), np.array(-2), ints(5, 3, 1)])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gathering_constant_indices(
    indices: np.ndarray, axis: int, rng: np.random.Generator
) -> None:
    case = Case([node("Gather", "x i", "y", axis=axis)], {"x": (6, 7, 8)}, {"i": indices})
    agree(case, floats(rng, case))
    even = len(set(np.diff(indices.reshape(-1) % 6).tolist())) < 2
    kernel = case.lower().launches[0].spec.kernel
    assert (kernel in COPIES) or not even


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_gathering(axis: int, dtype: str, precision: str, rng: np.random.Generator) -> None:
    inputs = {"x": (4, 5, 6), "i": (2, 3)}
    case = Case([node("Gather", "x i", "y", axis=axis)], inputs, {}, dtypes={"i": dtype})
    size = inputs["x"][axis]
    feeds = floats(rng, case) | {"i": rng.integers(-size, size, (2, 3)).astype(dtype)}
    agree(case, feeds, precision)


@pytest.mark.parametrize("axis", [0, -1])
def test_gathering_elements(axis: int, rng: np.random.Generator) -> None:
    inputs = {"x": (4, 5, 6), "i": (4, 5, 3) if axis else (2, 5, 6)}
    gather = node("GatherElements", "x i", "y", axis=axis)
    case = Case([gather], inputs, {}, dtypes={"i": "int64", "x": "int32", "y": "int32"})
    size = inputs["x"][axis]
    x = rng.integers(-(2**31), 2**31, inputs["x"]).astype(np.int32)
    agree(case, {"x": x, "i": rng.integers(-size, size, inputs["i"])})


@pytest.mark.parametrize(("count", "batch"), [(1, 0), (2, 0), (3, 0), (1, 1), (2, 1)])
def test_gathering_slices(count: int, batch: int, rng: np.random.Generator) -> None:
    inputs = {"x": (4, 3, 4), "i": (4, 2, count)}
    case = Case([node("GatherND", "x i", "y", batch_dims=batch)], inputs, {}, dtypes={"i": "int64"})
    feeds = floats(rng, case) | {"i": rng.integers(-3, 3, inputs["i"])}
    agree(case, feeds)


def test_an_index_outside_reads_inside_the_tensor(rng: np.random.Generator) -> None:
    case = Case([node("Gather", "x i", "y")], {"x": (4, 3), "i": (4,)}, {}, dtypes={"i": "int64"})
    x = floats(rng, case)["x"]
    actual = gpu_interpreter.run(case.lower(), {"x": x, "i": ints(4, 2**40, -5, -(2**40))})["y"]
    np.testing.assert_array_equal(actual, x[[3, 3, 0, 0]])


@pytest.mark.parametrize("reduction", ["none", "add", "max", "min"])
@pytest.mark.parametrize("axis", [0, 1])
def test_scattering_elements(reduction: str, axis: int, rng: np.random.Generator) -> None:
    inputs = {"x": (5, 6), "i": (3, 4), "u": (3, 4)}
    scatter = node("ScatterElements", "x i u", "y", axis=axis, reduction=reduction)
    case = Case([scatter], inputs, {}, dtypes={"i": "int64"})
    size = inputs["x"][axis]
    order = np.argsort(rng.random((size, size)), axis=axis)  # each place once
    indices = order[:3, :4]
    if reduction != "none":
        indices = rng.integers(-size, size, (3, 4))  # also twice
    feeds = {n: rng.normal(size=s).astype(np.float32) for n, s in inputs.items()}
    close(case, {**feeds, "i": indices})


@pytest.mark.parametrize("reduction", ["none", "add"])
def test_scattering_slices(reduction: str, rng: np.random.Generator) -> None:
    inputs = {"x": (5, 4, 3), "i": (3, 2), "u": (3, 3)}
    case = Case(
        [node("ScatterND", "x i u", "y", reduction=reduction)], inputs, {}, dtypes={"i": "int64"}
    )
    flat = rng.permutation(20)[:3]
    feeds = floats(rng, case) | {"i": np.stack([flat // 4, flat % 4 - 4], axis=1)}
    close(case, feeds)


def test_a_product_of_updates_is_refused() -> None:
    inputs = {"x": (5, 6), "i": (3, 4), "u": (3, 4)}
    scatter = node("ScatterElements", "x i u", "y", reduction="mul")
    with pytest.raises(NotCoveredError, match="'mul'"):
        Case([scatter], inputs, {}, dtypes={"i": "int64"}).lower()


def resize(target: np.ndarray, **attributes: object) -> Case:
    sized = target.dtype == np.int64
    one = node("Resize", "x", "y", **attributes)
    one.input[:] = ["x", "", "", "target"] if sized else ["x", "", "target"]
    return Case([one], {"x": (2, 3, 7, 8)}, {"target": target})


SIZES = {
    "up": ints(2, 3, 15, 17),
    "down": ints(2, 3, 4, 5),
    "mixed": ints(2, 3, 11, 3),
    "scales": np.array([1, 1, 1.7, 0.6], np.float32),
}
COORDINATE_MODES = (
    "half_pixel",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "half_pixel_symmetric",
)


@pytest.mark.parametrize("how", COORDINATE_MODES)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_resizing(mode: str, name: str, how: str, rng: np.random.Generator) -> None:
    case = resize(SIZES[name], mode=mode, coordinate_transformation_mode=how)
    close(case, floats(rng, case), rel=2e-5)


@pytest.mark.parametrize("how", COORDINATE_MODES)
@pytest.mark.parametrize("name", ["up", "down", "mixed"])
@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
def test_resizing_to_the_nearest(
    rounding: str, name: str, how: str, rng: np.random.Generator
) -> None:
    case = resize(
        SIZES[name], mode="nearest", nearest_mode=rounding, coordinate_transformation_mode=how
    )
    agree(case, floats(rng, case))


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("outside", [0, 1])
def test_resizing_with_wider_filters(mode: str, outside: int, rng: np.random.Generator) -> None:
    case = resize(SIZES["down"], mode=mode, antialias=1, exclude_outside=outside)
    feeds = floats(rng, case)
    (truth,) = ReferenceEvaluator(case.model()).run(["y"], feeds)
    actual = gpu_interpreter.run(case.lower(), feeds)["y"]
    np.testing.assert_allclose(actual, truth, rtol=2e-5, atol=2e-5)


def test_resizing_a_region(rng: np.random.Generator) -> None:
    attributes = {
        "coordinate_transformation_mode": "tf_crop_and_resize",
        "extrapolation_value": 9.0,
    }
    one = node("Resize", "x roi", "y", mode="linear", **attributes)
    one.input[:] = ["x", "roi", "", "sizes"]
    weights = {"roi": np.array([0, 0, 0.2, -0.1, 1, 1, 1.3, 0.7], np.float32)}
    case = Case([one], {"x": (1, 2, 6, 7)}, {**weights, "sizes": ints(1, 2, 5, 9)})
    close(case, floats(rng, case), rel=2e-5)


def test_resizing_volumes(rng: np.random.Generator) -> None:
    one = node("Resize", "x", "y", mode="linear")
    one.input[:] = ["x", "", "", "sizes"]
    case = Case([one], {"x": (1, 2, 4, 5, 6)}, {"sizes": ints(1, 2, 7, 3, 9)})
    close(case, floats(rng, case), rel=2e-5)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_resizing_after_a_convolution_keeps_channels_last(
    precision: str, rng: np.random.Generator
) -> None:
    one = node("Resize", "c", "r", mode="linear")
    one.input[:] = ["c", "", "scales"]
    nodes = [node("Conv", "x v", "c"), one, node("Conv", "r w", "y")]
    weights = {"v": normal(rng, 8, 3, 1, 1), "w": normal(rng, 4, 8, 1, 1)}
    weights["scales"] = np.array([1, 1, 2, 2], np.float32)
    case = Case(nodes, {"x": (1, 3, 5, 6)}, weights)
    kernels = [call.spec.title for call in case.lower(precision).launches]
    assert sum(kernel in COPIES for kernel in kernels) == 1  # the input, channels last


@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_sampling_a_grid(mode: str, padding: str, align: int, rng: np.random.Generator) -> None:
    sample = node("GridSample", "x g", "y", mode=mode, padding_mode=padding, align_corners=align)
    case = Case([sample], {"x": (2, 3, 5, 6), "g": (2, 4, 7, 2)}, {}, opset=20)
    feeds = floats(rng, case)
    feeds["g"] = rng.uniform(-1.3, 1.3, (2, 4, 7, 2)).astype(np.float32)
    close(case, feeds, rel=1e-4)


@pytest.mark.parametrize("corners", ["half_pixel", "output_half_pixel"])
@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("channels", [5, 16])
def test_regions_are_averaged(
    channels: int, samples: int, corners: str, rng: np.random.Generator
) -> None:
    """Of maps of 9 x 11 at half the size; some regions lie outside, some have no size."""
    case, feeds = regions_case(channels, samples, corners, rng)
    close(case, feeds, rel=1e-4)


@pytest.mark.parametrize("rest", ["a number", "a tensor"])
@pytest.mark.parametrize("channels", [5, 16])
def test_regions_that_are_not_chosen_get_the_rest(
    channels: int, rest: str, rng: np.random.Generator
) -> None:
    case, feeds = regions_case(channels, 2, "half_pixel", rng)
    (align,) = case.nodes
    align.output[0] = "a"
    choose = [align, node("Reshape", "m column", "c"), node("Where", "c a o", "y")]
    weights = {"column": np.array([-1, 1, 1, 1])}
    inputs = {**case.inputs, "m": (7,)}
    if rest == "a number":
        weights["o"] = np.array(3.5, np.float32)
    else:
        inputs["o"] = (7, channels, 3, 4)
        feeds["o"] = rng.normal(size=inputs["o"]).astype(np.float32)
    feeds["m"] = rng.uniform(size=7) < 0.5
    chosen = replace(
        case, nodes=choose, inputs=inputs, weights=weights, dtypes={**case.dtypes, "m": "bool"}
    )
    kernels = [launch.spec.title for launch in chosen.lower().launches]
    assert kernels.count("roi_align") == 1
    assert set(kernels) <= {"roi_align", *COPIES}
    close(chosen, feeds, rel=1e-4)


def regions_case(
    channels: int, samples: int, corners: str, rng: np.random.Generator
) -> tuple[Case, dict[str, np.ndarray]]:
    align = node(
        "RoiAlign", "x r b", "y", output_height=3, output_width=4, sampling_ratio=samples,
        spatial_scale=0.5, coordinate_transformation_mode=corners,
    )  # fmt: skip
    shapes = {"x": (2, channels, 9, 11), "r": (7, 4), "b": (7,)}
    case = Case([align], shapes, {}, dtypes={"b": "int64"}, opset=16)
    low = rng.uniform(-8, 16, (7, 2))
    regions = np.concatenate([low, low + rng.uniform(0, 16, (7, 2))], axis=1)
    regions[0] = regions[0, [0, 1, 0, 1]]
    regions[1] += 100
    feeds = {
        "x": rng.normal(size=shapes["x"]).astype(np.float32),
        "r": regions.astype(np.float32),
        "b": rng.integers(0, 2, 7),
    }
    return case, feeds


def test_regions_of_images_that_are_not_there_are_of_the_nearest(rng: np.random.Generator) -> None:
    align = node(
        "RoiAlign", "x r b", "y", output_height=2, output_width=2, sampling_ratio=1,
        coordinate_transformation_mode="half_pixel",
    )  # fmt: skip
    shapes = {"x": (2, 3, 4, 5), "r": (3, 4), "b": (3,)}
    program = Case([align], shapes, {}, dtypes={"b": "int64"}, opset=16).lower()
    feeds = {
        "x": rng.normal(size=shapes["x"]).astype(np.float32),
        "r": np.tile(np.array([0, 0, 4, 3], np.float32), (3, 1)),
    }
    outside, nearest = (
        gpu_interpreter.run(program, {**feeds, "b": images})["y"]
        for images in (ints(-1, 2, 2**40), ints(0, 1, 1))
    )
    np.testing.assert_array_equal(outside, nearest)


@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize(("shape", "axis"), [((3, 5, 7), 1), ((2, 1500), -1)])
def test_running_sums(
    shape: tuple[int, ...],
    axis: int,
    dtype: str,
    reverse: int,
    exclusive: int,
    rng: np.random.Generator,
) -> None:
    scan = node("CumSum", "x a", "y", reverse=reverse, exclusive=exclusive)
    case = Case([scan], {"x": shape}, {"a": np.array(axis)}, dtypes={"x": dtype, "y": dtype})
    x = (rng.normal(size=shape) * 2).astype(dtype)
    if dtype == "int64":
        agree(case, {"x": x + 2**40})
    else:
        close(case, {"x": x}, rel=1e-3)  # sums of 1500 numbers of either sign


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("k", [-2, 0, 3])
def test_triangles(k: int, upper: int, rng: np.random.Generator) -> None:
    weights = {"k": np.array(k)} if k else {}
    names = "x k" if k else "x"
    case = Case([node("Trilu", names, "y", upper=upper)], {"x": (2, 5, 6)}, weights)
    agree(case, floats(rng, case))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_one_hot(axis: int, rng: np.random.Generator) -> None:
    weights = {"depth": np.array(5), "values": np.array([-1, 2], np.float32)}
    case = Case(
        [node("OneHot", "i depth values", "y", axis=axis)],
        {"i": (3, 4)},
        weights,
        dtypes={"i": "int64"},
    )
    agree(case, {"i": rng.integers(-6, 7, (3, 4))})


def test_reversed_sequences(rng: np.random.Generator) -> None:
    one = node("ReverseSequence", "x n", "y", time_axis=1, batch_axis=0)
    case = Case([one], {"x": (3, 5, 2), "n": (3,)}, {}, dtypes={"n": "int64"})
    agree(case, floats(rng, case) | {"n": ints(5, 1, 3)})


def test_operators_that_simpler_ones_say(rng: np.random.Generator) -> None:
    nodes = [
        node("EyeLike", "x", "e", k=1),
        node("Add", "x e", "s"),
        node("Dropout", "s", "d"),
        node("CastLike", "d like", "y"),
    ]
    weights = {"like": np.zeros(1, np.float16)}
    case = Case(nodes, {"x": (3, 4)}, weights, dtypes={"y": "float16"})
    feeds = floats(rng, case)
    actual = gpu_interpreter.run(case.lower(), feeds)["y"]
    truth = (feeds["x"] + np.eye(3, 4, 1, np.float32)).astype(np.float16)
    np.testing.assert_array_equal(actual, truth)


def test_bits_taken_as_another_type(rng: np.random.Generator) -> None:
    cast = node("BitCast", "x", "y", to=onnx.TensorProto.INT32)
    case = Case([cast], {"x": (3, 4)}, {}, dtypes={"y": "int32"}, opset=26)
    x = floats(rng, case)["x"]
    actual = gpu_interpreter.run(case.lower(), {"x": x})["y"]
    np.testing.assert_array_equal(actual, x.view(np.int32))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("channels", [3, 21, 130])
def test_changes_of_layout(channels: int, precision: str, rng: np.random.Generator) -> None:
    nodes = [node("Transpose", "x", "t", perm=[0, 2, 3, 1]), node("Neg", "t", "y")]
    case = Case(nodes, {"x": (2, channels, 5, 7)}, {})
    assert [call.spec.title for call in case.lower(precision).launches] == ["transpose_tiles"]
    agree(case, floats(rng, case), precision)


@pytest.mark.parametrize("trial", range(10))
def test_copies_of_any_order(trial: int, rng: np.random.Generator) -> None:
    rank = int(rng.integers(1, 6))
    shape = tuple(int(n) for n in rng.integers(1, 6, rank))
    there, back = (rng.permutation(rank).tolist() for _ in range(2))
    nodes = [
        node("Transpose", "x", "t", perm=there),
        node("Add", "t z", "a"),
        node("Transpose", "a", "y", perm=back),
    ]
    inputs = {"x": shape, "z": tuple(shape[at] for at in there)}
    case = Case(nodes, inputs, {})
    agree(case, floats(rng, case))


def test_dense_strides_keep_the_order_of_others(rng: np.random.Generator) -> None:
    shape = (3, 4, 5)
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        lies = np.empty([shape[at] for at in order]).transpose(np.argsort(order))
        strides = tuple(s // 8 for s in lies.strides)
        assert like(strides, shape) == strides


MOVES_OF_INTEGERS = {
    "slice": (node("Slice", "r starts ends", "m"), {"starts": ints(0, 1), "ends": ints(9, 4)}),
    "expand": (node("Expand", "r shape", "m"), {"shape": ints(2, 6, 5, 5)}),
    "tile": (node("Tile", "r repeats", "m"), {"repeats": ints(1, 1, 2, 1)}),
    "gather": (node("Gather", "r places", "m", axis=1), {"places": ints(4, 0, 3)}),
    "depth to space": (node("DepthToSpace", "r", "m", blocksize=1), {}),
}


@pytest.mark.parametrize("name", MOVES_OF_INTEGERS)
def test_what_lies_as_int8_is_moved_as_it_lies(name: str, rng: np.random.Generator) -> None:
    move, weights = MOVES_OF_INTEGERS[name]
    nodes = [
        node("QuantizeLinear", "x s z", "q"),
        node("DequantizeLinear", "q s z", "r"),
        move,
        node("QuantizeLinear", "m s z", "p"),
        node("DequantizeLinear", "p s z", "y"),
    ]
    # A scale that divides without rounding, so that every runtime rounds alike.
    grid = {"s": np.array(2**-5, np.float32), "z": np.array(0, np.int8)}
    case = Case(nodes, {"x": (1, 6, 5, 5)}, {**weights, **grid})
    feeds = floats(rng, case)
    program = case.lower("int8")
    actual = gpu_interpreter.run(program, feeds)["y"]
    np.testing.assert_array_equal(actual, case.truth(feeds)["y"])
    first, *_ = program.launches
    assert dict(first.spec.signature)["y"].startswith("*i8")


def test_parts_of_int8_are_moved_as_they_lie(rng: np.random.Generator) -> None:
    split = node("Split", "r parts", "a", axis=1)
    split.output.append("b")
    nodes = [
        node("QuantizeLinear", "x s z", "q"),
        node("DequantizeLinear", "q s z", "r"),
        split,
        node("QuantizeLinear", "a s z", "p"),
        node("DequantizeLinear", "p s z", "d"),
        node("Add", "d b", "y"),
    ]
    grid = {"s": np.array(2**-5, np.float32), "z": np.array(0, np.int8)}
    case = Case(nodes, {"x": (1, 6, 5, 5)}, {"parts": ints(3, 3), **grid})
    feeds = floats(rng, case)
    program = case.lower("int8")
    assert len(program.launches) == 2
    actual = gpu_interpreter.run(program, feeds)["y"]
    np.testing.assert_array_equal(actual, case.truth(feeds)["y"])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_halves_that_are_joined_again_stay_where_they_are(
    precision: str, rng: np.random.Generator
) -> None:
    split = node("Split", "c parts", "a", axis=1)
    split.output.append("b")
    nodes = [  # a block of YOLOv8
        node("Conv", "x u", "c"),
        split,
        node("Conv", "b v", "d", pads=[1, 1, 1, 1]),
        node("Concat", "a b d", "j", axis=1),
        node("Conv", "j w", "y"),
    ]
    weights = {"parts": ints(8, 8), "u": normal(rng, 16, 3, 1, 1)}
    weights |= {"v": normal(rng, 6, 8, 3, 3), "w": normal(rng, 5, 22, 1, 1)}
    case = Case(nodes, {"x": (2, 3, 6, 6)}, weights)
    kernels = [call.spec.title for call in case.lower(precision).launches]
    assert sum(kernel in COPIES for kernel in kernels) == 1  # the input, channels last
    close(case, floats(rng, case), rel=1e-4)


@pytest.mark.parametrize(("side", "elements"), [(2, 1024), (64, 4096)])
def test_blocks_that_copy_are_large_where_there_are_enough(
    side: int, elements: int, rng: np.random.Generator
) -> None:
    nodes = [
        node("Conv", "x v", "c"),
        node("Resize", "c", "r", mode="nearest", coordinate_transformation_mode="asymmetric"),
        node("Conv", "r w", "y", pads=[1, 1, 1, 1]),
    ]
    nodes[1].input[:] = ["c", "", "scales"]
    nodes[1].attribute.append(onnx.helper.make_attribute("nearest_mode", "floor"))
    weights = {"v": normal(rng, 64, 8, 1, 1), "w": normal(rng, 4, 64, 3, 3)}
    weights["scales"] = np.array([1, 1, 2, 2], np.float32)
    case = Case(nodes, {"x": (1, 8, side, side)}, weights)
    (copy,) = (
        call.spec
        for op in case.lower("fp16").ops
        for call in op.tactics[0]
        if call.spec.title == "elementwise" and "Resize:r" in op.nodes
    )
    assert dict(copy.constants)["BLOCK"] == elements
