"""Models of torchvision, exported by PyTorch: the decoder that is guessed gives what they give."""

import json

import numpy as np
import onnxruntime
import pytest
from click.testing import CliRunner

from pipelines.config import PreprocessConfig
from pipelines.decode_config import DecodeConfig
from pipelines.results import ClassScores, SegmentationMap
from pipelines.stages.decode import decode, view_of
from pipelines.stages.preprocess import fit
from toolkit.cli.main import tandem
from toolkit.guess.rules import guess

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch", reason="PyTorch is not installed")
# A torchvision of another build than torch's cannot register its operators.
NO_TORCHVISION = (ImportError, RuntimeError)
pytest.importorskip("torchvision", reason="it is not that of torch", exc_type=NO_TORCHVISION)
SIDE = 160


def export(network, path, names):
    """Export with random weights; return the file and the network's own answer to a picture."""
    torch.manual_seed(0)
    network.eval()
    picture = torch.rand(1, 3, SIDE, SIDE)
    torch.onnx.export(network, (picture,), path, dynamo=False, output_names=names, opset_version=17)
    with torch.no_grad():
        return picture.numpy(), network(picture)


def decoded(path, picture):
    """Guess, run the file in onnxruntime and decode; the frame is the input itself."""
    facts, proposal = guess(path)
    assert proposal.sureness == "likely"
    config: DecodeConfig = proposal.best.decode
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    arrays = session.run(names, {session.get_inputs()[0].name: picture})
    outputs = dict(zip(names, arrays, strict=True))
    preprocess = PreprocessConfig(width=SIDE, height=SIDE, resize="stretch")
    view = view_of(fit(SIDE, SIDE, preprocess), (SIDE, SIDE, 3), preprocess)
    assert facts.size == (SIDE, SIDE)
    return decode(outputs, config, view)


def test_a_segmentation(tmp_path):
    from torchvision.models import segmentation

    class Out(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = segmentation.lraspp_mobilenet_v3_large(
                weights=None, weights_backbone=None
            )

        def forward(self, picture):
            return self.network(picture)["out"]

    picture, truth = export(Out(), tmp_path / "m.onnx", ["out"])
    result = decoded(tmp_path / "m.onnx", picture)
    assert isinstance(result, SegmentationMap)
    agreement = (result.class_ids == truth[0].argmax(dim=0).numpy()).mean()
    assert agreement > 0.999  # logits of random weights are close to each other


def test_a_classifier(tmp_path):
    from torchvision.models import mobilenet_v3_small

    picture, truth = export(mobilenet_v3_small(weights=None), tmp_path / "m.onnx", None)
    result = decoded(tmp_path / "m.onnx", picture)
    assert isinstance(result, ClassScores)
    best = torch.softmax(truth[0], dim=0).topk(5)
    np.testing.assert_allclose(result.scores, best.values.numpy(), rtol=1e-3)


def test_the_command_reads_an_export(tmp_path):
    from torchvision.models import mobilenet_v3_small

    export(mobilenet_v3_small(weights=None), tmp_path / "m.onnx", None)
    result = CliRunner().invoke(tandem, ["model", "guess", str(tmp_path / "m.onnx"), "--json"])
    (candidate,) = json.loads(result.output)["candidates"]
    assert (candidate["kind"], candidate["classes"]) == ("classification", 1000)
    assert candidate["decode"]["softmax"] is True
