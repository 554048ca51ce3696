"""Camera frames become an engine's input in one kernel: the CPU's bits, and no copy of numbers."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gpu_graphs import ORIN
from model_fixtures import small_convnet
from msgspec.structs import replace as replace_fields

pytest.importorskip("triton", reason="kernels run in Triton's interpreter")

import cuda_double
import gpu_interpreter

from device.engine.file import open_engine
from device.engine.frame_manifest import FRAME_SIZES
from device.engine.manifest import TensorInfo
from device.engine.manifest_check import check_manifest
from device.engine.preprocessing import Preprocessing
from device.errors import EngineError, SessionError
from device.runtime.frames import (
    FrameInput,
    FramePixels,
    FramePlace,
    frame_opener,
    why_no_frames,
)
from device.runtime.session import Session, open_session
from pipelines.config import PipelineConfig, PreprocessConfig, SourceConfig
from pipelines.decode_config import Classification
from pipelines.frame import Frame, Nv12, Stamp
from pipelines.results import ClassScores
from pipelines.runtime.batch import BatchRunner, Model
from pipelines.runtime.feed import DeviceFeed
from pipelines.stages.preprocess import fit, inner_size, preprocess
from pipelines.vision import cv2
from scripts import bench_frames
from toolkit.cli.main import tandem
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.errors import BuildError
from toolkit.gpu.codegen.compile_kernels import compile_ops
from toolkit.gpu.codegen.triton_version import has_compiler
from toolkit.gpu.frames import PIXELS, compile_frames, frame_program
from toolkit.gpu.segments import GpuBackend
from toolkit.quantize.preprocess.decide import StatedPreprocessing
from toolkit.quantize.preprocess.presets import PRESETS
from toolkit.quantize.ranges.measure import RangeOptions

SIDE = 24  # of the network's input
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}

# (height, width) of the frame, and how it becomes an input
CASES = (
    ((90, 160), PreprocessConfig(width=48, height=48)),
    ((160, 90), PreprocessConfig(width=64, height=40, color="bgr", layout="nhwc")),
    ((60, 80), PreprocessConfig(width=96, height=96, **IMAGENET)),
    ((62, 130), PreprocessConfig(width=40, height=24, resize="stretch", color="grey")),
    (
        (100, 130),
        PreprocessConfig(width=64, height=48, resize="centre-crop", crop_fraction=0.875),
    ),
    ((96, 128), PreprocessConfig(width=64, height=64, dtype="float16", pad_value=0)),
    (
        (30, 50),
        PreprocessConfig(width=64, height=64, dtype="uint8", scale=1.0, color="bgr"),
    ),
)


def frame_of(rng: np.random.Generator, pixels: str, size: tuple[int, int]) -> FramePixels:
    """Noise: every pixel differs from its neighbours. NV12 with a stride beyond its width."""
    height, width = size
    if pixels == "bgr":
        rows = rng.integers(0, 256, (height, width, 3), np.uint8)
    else:
        rows = rng.integers(0, 256, (height * 3 // 2, width + 6), np.uint8)
    return FramePixels(rows, pixels, width, height)


def as_bgr(frame: FramePixels) -> np.ndarray:
    if frame.pixels == "bgr":
        return frame.rows
    return cv2.cvtColor(frame.rows, cv2.COLOR_YUV2BGR_NV12)[: frame.height, : frame.width]


def place_of(frame: FramePixels, config: PreprocessConfig) -> FramePlace:
    geometry = fit(frame.height, frame.width, config)
    inner = inner_size(frame.height, frame.width, config)
    return FramePlace(*inner, geometry.pad_x, geometry.pad_y)


def differences_in_steps(image: np.ndarray, frame: FramePixels, config: PreprocessConfig) -> float:
    """Return the largest difference from the CPU's input, in levels of the frame's bytes."""
    expected = preprocess(as_bgr(frame), config)[0][0].astype(np.float64)
    steps = np.array([config.scale / std for std in config.std])
    axis = (-1, 1, 1) if config.layout == "nchw" else (1, 1, -1)
    return float(np.max(np.abs(image.astype(np.float64) - expected) / steps.reshape(axis)))


@pytest.mark.parametrize("pixels", PIXELS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1].resize} {case[1].color}")
def test_the_kernel_is_within_a_step_of_the_cpu(
    case: tuple[tuple[int, int], PreprocessConfig], pixels: str, rng: np.random.Generator
) -> None:
    size, config = case
    frame = frame_of(rng, pixels, size)
    tensor = TensorInfo(name="x", dtype=config.dtype, shape=config.input_shape)
    program = frame_program(pixels, config, tensor)
    program = replace(  # the memory of a frame of this size, not of the largest one
        program, offsets={"frame": 0, "image": -(-frame.rows.nbytes // 64) * 64}
    )
    program = replace(program, workspace_bytes=program.offsets["image"] + program.sizes["image"])
    program = replace(
        program,
        inputs={"frame": replace(program.inputs["frame"], shape=frame.rows.shape)},
    )
    place = place_of(frame, config)
    stride = frame.rows.shape[1] * (3 if pixels == "bgr" else 1)
    point = (frame.width, frame.height, stride, frame.height * stride)
    point = (*point, place.inner_width, place.inner_height, place.x, place.y)
    image = gpu_interpreter.run(program, {"frame": frame.rows}, point)["x"]
    difference = differences_in_steps(image, frame, config)
    assert difference <= 1.01 if config.dtype != "float16" else 1.3  # FP16 rounds once more
    if config.resize != "letterbox":
        assert difference < 0.01


@pytest.mark.skipif(not has_compiler(), reason="Triton is not installed")
def test_the_kernels_compile_for_a_board() -> None:
    config = PreprocessConfig(width=640, height=640)
    tensor = TensorInfo(name="x", dtype="float32", shape=config.input_shape)
    program = frame_program("nv12", config, tensor)
    (kernel,) = compile_ops(program.ops, ORIN)[1].values()
    assert kernel.cubin
    assert not kernel.spill_bytes


def stated(name: str = "yolo") -> RangeOptions:
    return RangeOptions(preprocess=StatedPreprocessing(PRESETS[name].values, name))


@pytest.fixture(scope="module")
def engine_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frames")
    model = small_convnet(folder / "m.onnx", np.random.default_rng(5), size=SIDE)
    words = f"build {model} --profile orin-nano-8gb --precision fp16 --preprocess yolo"
    with cuda_double.interpreted_cubins():
        done = CliRunner().invoke(
            tandem,
            [*words.split(), "--preprocess-on", "gpu", "-o", str(folder / "m.engine")],
            catch_exceptions=False,
        )
    assert done.exit_code == 0, done.output
    return folder / "m.engine"


@pytest.fixture
def gpu() -> Iterator[cuda_double.CudaDouble]:
    with cuda_double.installed() as double:
        yield double
        gc.collect()


def test_a_session_takes_bytes_of_frames_and_gives_what_numbers_give(
    engine_path: Path, gpu: cuda_double.CudaDouble, rng: np.random.Generator
) -> None:
    config = PreprocessConfig(width=SIDE, height=SIDE)
    with open_engine(engine_path) as engine, Session(engine) as session:
        assert why_no_frames(engine, session) is None
        target = FrameInput(engine, session, 1, {})
        for pixels, size in (("bgr", (90, 160)), ("nv12", (48, 64)), ("bgr", (20, 30))):
            frame = frame_of(rng, pixels, size)
            target.put(0, frame, place_of(frame, config))
            assert differences_in_steps(target.image(0), frame, config) <= 1.01
            x = target.image(0)[None]
            gpu.calls.clear()
            target.put(0, frame, place_of(frame, config))
            outputs = target.infer(1)
            assert np.array_equal(outputs["y"], session.infer({"x": x})["y"])
            assert gpu.calls.count("cuMemcpyHtoDAsync_v2") <= 2  # the frame; x in the second run
        target.close()
    gc.collect()
    assert not gpu.memory


def test_each_frame_of_a_batch_has_its_place(
    engine_path: Path, gpu: cuda_double.CudaDouble, rng: np.random.Generator
) -> None:
    config = PreprocessConfig(width=SIDE, height=SIDE)
    frames = [frame_of(rng, pixels, (24, 40)) for pixels in ("bgr", "nv12")]
    with open_engine(engine_path) as engine, Session(engine) as session:
        target = FrameInput(engine, session, 3, {})
        for row, frame in ((2, frames[0]), (0, frames[1])):
            target.put(row, frame, place_of(frame, config))
        assert differences_in_steps(target.image(2), frames[0], config) <= 1.01
        assert differences_in_steps(target.image(0), frames[1], config) <= 1.01
        assert not target.image(1).any()  # what no frame has filled is zero
        target.close()


def test_the_script_that_compares_finds_them_alike(
    engine_path: Path, gpu: cuda_double.CudaDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_frames, "SIZES", ((48, 64), (21, 35)))
    config = PreprocessConfig(width=SIDE, height=SIDE)
    with open_engine(engine_path) as engine, Session(engine) as session:
        target = FrameInput(engine, session, 1, {})
        rows = bench_frames.compare(target, config, np.random.default_rng(3))
        target.close()
    assert [(row.pixels, row.width) for row in rows] == [
        ("bgr", 64), ("bgr", 35), ("nv12", 64), ("nv12", 34),
    ]  # fmt: skip
    assert max(row.largest for row in rows) <= 1.01


def test_a_frame_larger_than_places_can_be_counted_is_refused(
    engine_path: Path, gpu: cuda_double.CudaDouble
) -> None:
    with open_engine(engine_path) as engine, Session(engine) as session:
        target = FrameInput(engine, session, 1, {})
        frame = FramePixels(np.zeros((2, 16385, 3), np.uint8), "bgr", 16385, 2)
        with pytest.raises(SessionError, match="16385 x 2 pixels; kernels take up to 16384"):
            target.put(0, frame, FramePlace(SIDE, 1, 0, 11))
        target.close()


PIPELINE = PipelineConfig(
    name="test",
    source=SourceConfig(uri="test://"),
    preprocess=PreprocessConfig(width=SIDE, height=SIDE),
    decode=Classification(scores="y", top=10),
)


def scores_of(runner: BatchRunner, frame: Frame) -> np.ndarray:
    (result,) = runner.run([frame], [])
    assert isinstance(result.decoded, ClassScores)
    return result.decoded.scores


def test_a_pipeline_gives_a_camera_s_nv12_to_the_gpu_as_it_is(
    engine_path: Path, gpu: cuda_double.CudaDouble, rng: np.random.Generator
) -> None:
    rows = rng.integers(0, 256, (72, 64), np.uint8)
    looked: list[int] = []

    def image() -> np.ndarray:
        looked.append(1)
        return cv2.cvtColor(rows, cv2.COLOR_YUV2BGR_NV12)

    def frame() -> Frame:
        return Frame(image, 0, Stamp.now(), Stamp.now(), "test", nv12=Nv12(rows, 64, 48))

    labels = tuple("abcdefghij")
    with open_engine(engine_path) as engine, Session(engine) as session:
        opener = frame_opener(engine, session)
        assert opener is not None
        on_gpu = BatchRunner(PIPELINE, Model(session, labels, "", frames=opener))
        on_gpu.warm_up()
        scores = scores_of(on_gpu, frame())
        on_gpu.close()
        assert not looked
        on_cpu = BatchRunner(PIPELINE, Model(session, labels, ""))
        assert np.allclose(scores, scores_of(on_cpu, frame()), atol=1e-3)
        assert looked


@pytest.mark.parametrize("size", [(90, 160), (20, 24)], ids=["larger", "smaller"])
def test_a_pipeline_gives_bgr_no_larger_than_the_input_shows_it(
    size: tuple[int, int],
    engine_path: Path,
    gpu: cuda_double.CudaDouble,
    rng: np.random.Generator,
) -> None:
    config = PreprocessConfig(width=SIDE, height=SIDE)
    image = rng.integers(0, 256, (*size, 3), np.uint8)
    with open_engine(engine_path) as engine, Session(engine) as session:
        target = FrameInput(engine, session, 1, {})
        feed = DeviceFeed(config, target)
        frame = Frame(image, 0, Stamp.now(), Stamp.now(), "test")
        placed = feed.put(0, frame)
        assert placed.shape == image.shape
        expected, geometry = preprocess(image, config)
        assert placed.geometry == geometry
        assert np.abs(target.image(0) - expected[0]).max() <= 1.01 / 255
        is_copied = image.nbytes in {len(block) for block in gpu.memory.values()}
        assert is_copied == (size == (20, 24))
        feed.close()


def test_without_a_gpu_frames_become_inputs_on_the_cpu(
    engine_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_engine(engine_path) as engine, Session(engine) as session:
        assert frame_opener(engine, session) is None
    assert "frames become inputs on the CPU" in caplog.text


def test_an_engine_without_the_kernels_says_what_adds_them(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    build_engine(model, "laptop", tmp_path / "m.engine", BuildOptions(precision="fp32"))
    with open_engine(tmp_path / "m.engine") as engine, open_session(engine.path) as session:
        assert "--preprocess-on gpu" in str(why_no_frames(engine, session))
        assert frame_opener(engine, session) is None


@pytest.mark.parametrize(
    ("profile", "ranges", "message"),
    [
        ("orin-nano-8gb", RangeOptions(), "nothing says what it is"),
        ("laptop", stated(), "profile laptop has no GPU"),
    ],
)
def test_what_no_kernel_can_be_made_for_is_refused(
    profile: str, ranges: RangeOptions, message: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    options = BuildOptions(precision="fp32", ranges=ranges, preprocess_on="gpu")
    with cuda_double.interpreted_cubins(), pytest.raises(BuildError, match=message):
        build_engine(model, profile, tmp_path / "m.engine", options)


def test_an_input_of_open_size_is_refused() -> None:
    tensor = TensorInfo(name="x", dtype="float32", shape=(1, 3, "h", 32))
    with pytest.raises(BuildError, match="a fixed size, and the model takes 'x' float32"):
        compile_frames(GpuBackend(ORIN, "fp16"), Preprocessing(), [tensor])


def test_kernels_that_write_elsewhere_are_refused(engine_path: Path) -> None:
    with open_engine(engine_path) as engine:
        manifest, entries = engine.manifest, engine.entries
    rows = manifest.frames
    assert rows
    (launch,) = rows[0].kernels.works[0].tactics[0].launches
    assert len(launch.arguments) == 2 + len(FRAME_SIZES) + 2

    def changed(**changes: object) -> object:
        return replace_fields(manifest, frames=(replace_fields(rows[0], **changes), rows[1]))

    check_manifest(manifest, entries)
    with pytest.raises(EngineError, match="which is no input"):
        check_manifest(changed(tensor="y"), entries)
    with pytest.raises(EngineError, match="two kernels take the same pixels"):
        check_manifest(changed(pixels="nv12"), entries)
