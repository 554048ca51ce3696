"""Exports of PyTorch's detectors as pipelines: what they find is what PyTorch's own code finds."""

from pathlib import Path

import cv2
import numpy as np
import pytest
from picture_models_fixtures import picture_of, run

from scripts.torchvision_operators import import_torchvision

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporter by tracing
SIDE = 128
LEAST = 0.5  # the threshold of the decoders that a guess writes


def detr() -> "torch.nn.Module":
    """The network that DETR's authors show: convolutions, a transformer, 12 queries, 7 classes.

    Its weights are random, and its head is scaled so that some queries are sure of a class.
    """

    class Detr(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = torch.nn.Sequential(
                torch.nn.Conv2d(3, 16, 7, 4, 3), torch.nn.ReLU(),
                torch.nn.Conv2d(16, 32, 3, 4, 1), torch.nn.ReLU(),
            )  # fmt: skip
            self.transformer = torch.nn.Transformer(
                32, 4, 1, 1, dim_feedforward=64, dropout=0.0, batch_first=True
            )
            self.place = torch.nn.Parameter(torch.rand(1, 64, 32))
            self.query = torch.nn.Parameter(torch.randn(1, 12, 32))
            self.class_labels_classifier = torch.nn.Linear(32, 7 + 1)
            self.bbox_predictor = torch.nn.Linear(32, 4)

        def forward(self, pixel_values: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
            tokens = self.backbone(pixel_values).flatten(2).transpose(1, 2)
            decoded = self.transformer(tokens + self.place, self.query)
            logits = self.class_labels_classifier(decoded) * 4.0
            return logits, self.bbox_predictor(decoded).sigmoid()

    torch.manual_seed(3)
    return Detr().eval()


def export(network: "torch.nn.Module", path: Path, side: int, names: list[str]) -> Path:
    torch.onnx.export(
        network, (torch.rand(1, 3, side, side),), path, dynamo=False, opset_version=17,
        input_names=["pixel_values"], output_names=names,
    )  # fmt: skip
    return path


def square(side: int) -> np.ndarray:
    return cv2.resize(picture_of("astronaut.jpg"), (side, side))


def as_input(picture: np.ndarray, mean: object, std: object) -> "torch.Tensor":
    rgb = picture[:, :, ::-1].astype(np.float32) / 255.0
    blob = (rgb - np.float32(mean)) / np.float32(std)
    return torch.from_numpy(np.ascontiguousarray(blob.transpose(2, 0, 1))[None])


def test_detr_finds_what_its_authors_code_finds(tmp_path: Path) -> None:
    network, picture = detr(), square(SIDE)
    model = export(network, tmp_path / "detr.onnx", SIDE, ["logits", "pred_boxes"])
    result = run(tmp_path, model, picture)
    with torch.no_grad():
        blob = as_input(picture, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        logits, boxes = network(blob)
    scores, classes = logits.softmax(-1)[0, :, :-1].max(-1)  # the last class is no object
    centre, half = boxes[0, :, :2], boxes[0, :, 2:] / 2
    corners = (torch.cat([centre - half, centre + half], 1) * SIDE).clamp(0, SIDE)
    order = [int(n) for n in scores.argsort(descending=True) if scores[n] >= LEAST]
    assert order
    actual = result.event.detections
    assert [one.class_id for one in actual] == [int(classes[n]) for n in order]
    np.testing.assert_allclose([one.score for one in actual], scores[order], atol=2e-3)
    np.testing.assert_allclose([one.box for one in actual], corners[order], atol=0.6)


def as_trained(network: "torch.nn.Module") -> None:
    """Give batch norms the statistics of a picture, and make the head sure of some classes."""
    norms = [m for m in network.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    with torch.no_grad():
        picture = as_input(square(320), [0.5], [0.5])
        pair = torch.cat([picture, picture.flip(3)])
        network.head(list(network.backbone(pair).values()))
    for norm in norms:
        norm.eval()
    for level in network.head.classification_head.module_list:
        torch.nn.init.normal_(level[-1].weight, std=0.2)


@pytest.mark.slow
def test_ssd_of_torchvision_finds_what_torchvision_finds(tmp_path: Path) -> None:
    torchvision = import_torchvision()
    torch.manual_seed(5)
    network = torchvision.models.detection.ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=5
    ).eval()
    as_trained(network)

    class Tuple(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, pixel_values: "torch.Tensor") -> "tuple[torch.Tensor, ...]":
            (output,) = self.network(list(pixel_values))
            return output["boxes"], output["scores"], output["labels"]

    picture = square(320)
    model = export(Tuple().eval(), tmp_path / "ssd.onnx", 320, ["boxes", "scores", "labels"])
    result = run(tmp_path, model, picture)
    with torch.no_grad():
        (output,) = network(list(as_input(picture, [0.0], [1.0])))
    sure = output["scores"] >= LEAST
    assert sure.any()
    actual = result.event.detections
    assert len(actual) == min(int(sure.sum()), 100)
    expected = output["boxes"][sure][: len(actual)]
    np.testing.assert_allclose(
        sorted(one.score for one in actual),
        sorted(output["scores"][sure][: len(actual)].tolist()), atol=2e-3,
    )  # fmt: skip
    centres = np.array([one.box for one in actual])
    distance = np.abs(centres[:, None] - expected.numpy()[None]).max(-1).min(1)
    assert distance.max() < 1.0
