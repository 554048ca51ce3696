"""Build an INT8 engine of the shipped detector and find objects in an image.

    python examples/build_and_infer.py
    python examples/build_and_infer.py --profile orin-nx-16gb --image street.jpg

The engine runs where it is opened: on a Jetson on GPU and DLA, on a laptop on the CPU.
"""

import argparse
from pathlib import Path

import configs
from device.session import open_session
from pipelines.config import load_labels, load_model
from pipelines.sources.files import read_image
from pipelines.stages.decode import Detections, decode, view_of
from pipelines.stages.preprocess import preprocess
from toolkit.build import BuildOptions, RangeOptions, build_engine

MODEL_FILE = configs.ROOT / "models" / "robot-objects.toml"
IMAGE = configs.ROOT / "scenes" / "heldout" / "000.jpg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="agx-orin-64gb", help="see `tandem profiles`")
    parser.add_argument("--image", type=Path, default=IMAGE)
    parser.add_argument("--samples", type=int, default=16, help="calibration images to use")
    parser.add_argument("--out", type=Path, default=Path("robot.engine"))
    arguments = parser.parse_args()

    # The model file says how an image becomes the input and how outputs become detections.
    model = load_model(MODEL_FILE)
    labels = load_labels(MODEL_FILE.parent / model.labels)

    options = BuildOptions(
        data=MODEL_FILE.parent / model.calibration,
        ranges=RangeOptions(samples=arguments.samples, preprocess=model.preprocess),
    )
    result = build_engine(MODEL_FILE.parent / model.file, arguments.profile, arguments.out, options)
    print(f"wrote {result.path} ({result.path.stat().st_size / 1e6:.1f} MB)")

    image = read_image(arguments.image)  # uint8 [height, width, 3], BGR
    if image is None:
        raise SystemExit(f"{arguments.image} is not an image")
    blob, geometry = preprocess(image, model.preprocess)  # float32 [1, 3, 320, 320]
    with open_session(result.path) as session:
        for report in session.reports:
            print(f"{report.segment} ({report.processor}): {report.reason}")
        outputs = session.infer({session.inputs[0].name: blob})

    detections = decode(outputs, model.decode, view_of(geometry, image.shape, model.preprocess))
    assert isinstance(detections, Detections)
    for box, score, class_id in zip(
        detections.boxes, detections.scores, detections.class_ids, strict=True
    ):
        corners = " ".join(f"{value:.0f}" for value in box)
        print(f"{labels[class_id]} {score:.2f} at {corners}")


if __name__ == "__main__":
    main()
