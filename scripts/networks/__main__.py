"""Write a network to an ONNX file: `python -m scripts.networks resnet50 resnet50.onnx`."""

import argparse
from pathlib import Path

import onnx_ir as ir

from scripts.networks import EXPORTED, NETWORKS


def main() -> None:
    """Write the network that the command line names."""
    networks = NETWORKS | EXPORTED
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(networks))
    parser.add_argument("file", type=Path)
    parser.add_argument("--side", type=int, help="input side in pixels, where it can be chosen")
    parser.add_argument("--batch", type=int, default=1)
    arguments = parser.parse_args()
    ir.save(networks[arguments.name].model(arguments.batch, arguments.side), arguments.file)


if __name__ == "__main__":
    main()
