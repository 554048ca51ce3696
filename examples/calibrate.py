"""Calibrate the shipped detector with your own data, and build from the table.

    python examples/calibrate.py
    python examples/calibrate.py --images my-images/ --method auto --profile agx-orin-64gb

Calibration data is any iterable of samples: arrays for a model's only input, or a mapping from
input name to array. So data may come from a database, a ROS bag or a simulator. For a folder of
images, .npy or .npz files give the folder to `tandem.calibrate`, or to
`tandem calibrate` on the command line.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import tandem

CONFIGS = Path(__file__).parents[1] / "configs"
MODEL_FILE = CONFIGS / "models" / "robot-objects.toml"
SCENES = CONFIGS / "scenes"


def samples(folder: Path, config: tandem.PreprocessConfig, count: int) -> Iterator[np.ndarray]:
    """Yield float32 [1, 3, 320, 320]: what the network gets on the board."""
    paths = sorted(folder.glob("*.jpg"))
    for path in paths[:: max(1, len(paths) // count)][:count]:  # spread over the folder
        image = tandem.read_image(path)
        if image is not None:
            yield tandem.preprocess(image, config)[0].copy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, default=SCENES / "calibration")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--method", default="auto", help="or minmax, percentile, mse, entropy")
    parser.add_argument("--profile", default="orin-nx-16gb", help="the board of one engine")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the files")
    arguments = parser.parse_args()

    model = tandem.load_model(MODEL_FILE)
    onnx = MODEL_FILE.parent / model.file
    data = list(samples(arguments.images, model.preprocess, arguments.count))

    file = arguments.out / "robot.calib.json"
    table = tandem.calibrate(onnx, data, method=arguments.method, out=file)
    print(f"{len(table.tensors)} ranges from {table.samples} samples: {file}")

    # The table builds engines for any board; `tandem.read_table` reads it back.
    int8 = tandem.build(onnx, arguments.out / "int8.engine", calibration=table).path
    out = arguments.out / f"{arguments.profile}.engine"
    board = tandem.build(onnx, out, profile=arguments.profile, calibration=table).path
    print(f"wrote {board}")

    # How far is INT8 from FP32 on images that calibration did not see?
    fp32 = tandem.build(onnx, arguments.out / "fp32.engine").path
    with tandem.open_session(fp32) as exact, tandem.open_session(int8) as quantized:
        name = exact.inputs[0].name
        for sample in samples(SCENES / "heldout", model.preprocess, 4):
            truth, outputs = exact.infer({name: sample}), quantized.infer({name: sample})
            for output, reference in truth.items():
                noise = np.mean((reference - outputs[output]) ** 2)
                sqnr_db = 10 * np.log10(np.mean(reference**2) / noise)
                print(f"{output}: SQNR {sqnr_db:.1f} dB")


if __name__ == "__main__":
    main()
