"""The layers of NVIDIA's performance workbook, as rows and as convolutions."""

import csv
from pathlib import Path

from toolkit.dla.cycles.layers import ConvLayer

WORKBOOK = Path(__file__).parent / "data" / "nvdla_perf.csv"


def workbook_rows(net: str | None = None) -> list[dict[str, str]]:
    with WORKBOOK.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    return [row for row in rows if net in (None, row["net"])]


def as_convolution(row: dict[str, str], *, image: bool = False) -> ConvLayer:
    """The row's convolution, with the padding that its output size needs."""
    size = (int(row["height"]), int(row["width"]))
    kernel = (int(row["kernel_h"]), int(row["kernel_w"]))
    stride = (int(row["stride_h"]), int(row["stride_w"]))
    pads = [0, 0]
    if row["same_padding"] == "yes":
        pads = [
            max(0, (-(-s // t) - 1) * t + k - s)
            for s, k, t in zip(size, kernel, stride, strict=True)
        ]
    return ConvLayer(
        channels=int(row["channels"]),
        height=size[0],
        width=size[1],
        kernels=int(row["kernels"]),
        kernel=kernel,
        stride=stride,
        pads=(pads[0] // 2, pads[1] // 2, pads[0] - pads[0] // 2, pads[1] - pads[1] // 2),
        image=image,
        eltwise="x" if "eltwise" in row["kind"] else None,
    )
