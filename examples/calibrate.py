"""Calibrate the shipped detector with your own data, and build from the table.

    python examples/calibrate.py
    python examples/calibrate.py --images my-images/ --method auto

Calibration data is any iterable of samples: arrays for a model's only input, or a mapping from
input name to array. So data may come from a database, a ROS bag or a simulator. For a folder of
images, .npy or .npz files give the folder to `BuildOptions(data=...)` or `tandem calibrate`.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import configs
from calibration import read_table
from device.session import open_session
from pipelines.config import PreprocessConfig, load_model
from pipelines.sources.files import read_image
from pipelines.stages.preprocess import preprocess
from toolkit.build import BuildOptions, RangeOptions, build_engine

MODEL_FILE = configs.ROOT / "models" / "robot-objects.toml"
SCENES = configs.ROOT / "scenes"


def samples(folder: Path, config: PreprocessConfig, count: int) -> Iterator[np.ndarray]:
    """Yield float32 [1, 3, 320, 320]: what the network gets on the board."""
    paths = sorted(folder.glob("*.jpg"))
    for path in paths[:: max(1, len(paths) // count)][:count]:  # spread over the folder
        image = read_image(path)
        if image is not None:
            yield preprocess(image, config)[0].copy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, default=SCENES / "calibration")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--method", default="auto", help="or minmax, percentile, mse, entropy")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the files")
    arguments = parser.parse_args()

    model = load_model(MODEL_FILE)
    onnx = MODEL_FILE.parent / model.file
    data = list(samples(arguments.images, model.preprocess, arguments.count))

    table = arguments.out / "robot.calib.json"
    ranges = RangeOptions(method=arguments.method)
    options = BuildOptions(data=data, ranges=ranges, save_table=table)
    int8 = build_engine(onnx, "laptop", arguments.out / "int8.engine", options).path
    print(f"{len(read_table(table).tensors)} ranges from {len(data)} samples: {table}")

    # The table builds the engine of another board without data.
    options = BuildOptions(table=read_table(table))
    board = build_engine(onnx, "orin-nx-16gb", arguments.out / "orin-nx.engine", options).path
    print(f"wrote {board}")

    # How far is INT8 from FP32 on images that calibration did not see?
    fp32 = build_engine(onnx, "laptop", arguments.out / "fp32.engine").path
    with open_session(fp32) as exact, open_session(int8) as quantized:
        name = exact.inputs[0].name
        for sample in samples(SCENES / "heldout", model.preprocess, 4):
            truth, outputs = exact.infer({name: sample}), quantized.infer({name: sample})
            for output, reference in truth.items():
                noise = np.mean((reference - outputs[output]) ** 2)
                sqnr_db = 10 * np.log10(np.mean(reference**2) / noise)
                print(f"{output}: SQNR {sqnr_db:.1f} dB")


if __name__ == "__main__":
    main()
