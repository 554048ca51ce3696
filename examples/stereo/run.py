"""Build the stereo network with its plugin and compute the disparity of a shifted texture.

    python examples/stereo/run.py
    python examples/stereo/run.py --profile orin-nano-8gb --precision fp16

A GPU profile compiles the plugin's kernels; where they cannot run, the session computes the
operator's definition in ONNX on the CPU.
"""

import argparse
from pathlib import Path

import numpy as np
from make_model import HEIGHT, WIDTH, make_model

import tandem

PLUGIN = Path(__file__).with_name("plugin.py")
SHIFT = 9  # pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="laptop", help="see `tandem profiles`")
    parser.add_argument("--precision", choices=["fp32", "fp16"], default="fp32")
    parser.add_argument("--out", type=Path, default=Path("stereo.engine"))
    arguments = parser.parse_args()

    engine = tandem.build(
        make_model(),
        arguments.out,
        profile=arguments.profile,
        precision=arguments.precision,
        options=tandem.BuildOptions(plugins=tandem.load_plugins(PLUGIN)),
    ).path

    texture = np.random.default_rng(0).random((1, 1, HEIGHT, WIDTH + SHIFT), np.float32)
    left, right = texture[..., :WIDTH].copy(), texture[..., SHIFT:].copy()
    with tandem.open_session(engine) as session:
        for report in session.reports:
            print(f"{report.segment} ({report.processor}): {report.reason}")
        disparity = session.infer({"left": left, "right": right})["disparity"]  # [1, H, W]
    print(f"shifted by {SHIFT} pixels, median disparity {np.median(disparity):.2f}")


if __name__ == "__main__":
    main()
