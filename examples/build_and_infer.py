"""Build an INT8 engine of the shipped detector and find objects in an image.

    python examples/build_and_infer.py
    python examples/build_and_infer.py --profile orin-nx-16gb --image street.jpg

The engine runs where it is opened: on a Jetson on GPU and DLA, on a laptop on the CPU.
"""

import argparse
from pathlib import Path

import tandem

CONFIGS = Path(__file__).parents[1] / "configs"
MODEL_FILE = CONFIGS / "models" / "robot-objects.toml"
IMAGE = CONFIGS / "scenes" / "heldout" / "000.jpg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="agx-orin-64gb", help="see `tandem profiles`")
    parser.add_argument("--image", type=Path, default=IMAGE)
    parser.add_argument("--samples", type=int, default=16, help="calibration images to use")
    parser.add_argument("--method", default="auto", help="or minmax, percentile, mse, entropy")
    parser.add_argument("--out", type=Path, default=Path("robot.engine"))
    arguments = parser.parse_args()

    # The model file says how an image becomes the input and how outputs become detections.
    model = tandem.load_model(MODEL_FILE)
    labels = tandem.load_labels(MODEL_FILE.parent / model.labels)

    ranges = tandem.RangeOptions(
        arguments.method, samples=arguments.samples, preprocess=model.preprocess
    )
    result = tandem.build(
        MODEL_FILE.parent / model.file,
        arguments.out,
        profile=arguments.profile,
        calibration=MODEL_FILE.parent / model.calibration,
        options=tandem.BuildOptions(ranges=ranges),
    )
    print(f"wrote {result.path} ({result.path.stat().st_size / 1e6:.1f} MB)")

    image = tandem.read_image(arguments.image)  # uint8 [height, width, 3], BGR
    if image is None:
        raise SystemExit(f"{arguments.image} is not an image")
    blob, geometry = tandem.preprocess(image, model.preprocess)  # float32 [1, 3, 320, 320]
    with tandem.open_session(result.path) as session:
        for report in session.reports:
            print(f"{report.segment} ({report.processor}): {report.reason}")
        outputs = session.infer({session.inputs[0].name: blob})

    view = tandem.view_of(geometry, image.shape, model.preprocess)
    detections = tandem.decode(outputs, model.decode, view)
    assert isinstance(detections, tandem.Detections)
    for box, score, class_id in zip(
        detections.boxes, detections.scores, detections.class_ids, strict=True
    ):
        corners = " ".join(f"{value:.0f}" for value in box)
        print(f"{labels[class_id]} {score:.2f} at {corners}")


if __name__ == "__main__":
    main()
