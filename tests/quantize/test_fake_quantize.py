"""Fine-tuning sees the engine's numbers: on a DLA all, elsewhere all but those next to a half."""

import copy
import functools
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch.nn import functional as f

import tandem
from toolkit.partition.planning.forced import Forced

pytestmark = pytest.mark.usefixtures("quick_torch_export")
BOARD = "orin-nx-16gb"
ALL_ON_DLA = tandem.BuildOptions(
    plan=tandem.PlanOptions(forced=Forced(dla=("all",))), kernels=False
)
SIZE = 24


class Residual(torch.nn.Module):
    """Convolutions with batch normalisation and ReLU, a residual, both poolings, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(16)
        self.body = torch.nn.Conv2d(16, 16, 3, padding=1)
        self.down = torch.nn.Conv2d(16, 24, 3, stride=2, padding=1)
        self.head = torch.nn.Linear(24, 10)
        self.norm.running_mean.normal_(std=0.3)
        self.norm.running_var.uniform_(0.3, 1.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [N, 3, 24, 24] -> maps [N, 24, 3, 3] and scores [N, 10]."""
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(x + self.body(x))
        x = f.max_pool2d(x, 2)
        x = f.avg_pool2d(torch.relu(self.down(x)), 2)
        return x, self.head(x.mean((2, 3)))


class Gated(torch.nn.Module):
    """SiLU, LeakyReLU, Concat, upsampling and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.second = torch.nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.grow = torch.nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.last = torch.nn.Conv2d(24, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, 3, 24, 24] -> [N, 6, 24, 24], between 0 and 1."""
        x = f.silu(self.first(x))
        y = f.leaky_relu(self.second(x), 0.1)
        up = f.interpolate(y, scale_factor=2, mode="nearest")
        return torch.sigmoid(self.last(torch.cat([x, up, f.relu(self.grow(y))], 1)))


class Pooled(torch.nn.Module):
    """Its outputs are INT8 numbers, so that what Q has rounded can be counted."""

    def __init__(self) -> None:
        super().__init__()
        self.only = torch.nn.Conv2d(3, 32, 5, padding=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, 3, 24, 24] -> [N, 32, 24, 24]."""
        return f.max_pool2d(torch.relu(self.only(x)), 1)


def inputs(count: int, seed: int) -> list[np.ndarray]:
    numbers = np.random.default_rng(seed)
    return [numbers.normal(size=(1, 3, SIZE, SIZE)).astype(np.float32) for _ in range(count)]


def ranges_of(module: torch.nn.Module, profile: str) -> tandem.CalibrationTable:
    model = tandem.TorchModel(module, (torch.zeros(1, 3, SIZE, SIZE),))
    return tandem.calibrate(model, inputs(4, 0), method="minmax", profile=profile, accept_loss=True)


def prepared(
    kind: type[torch.nn.Module], profile: str, options: tandem.BuildOptions | None = None
) -> torch.nn.Module:
    """Return a network to train, the same in each test."""
    return copy.deepcopy(_prepared(kind, profile, options))


@functools.cache
def _prepared(
    kind: type[torch.nn.Module], profile: str, options: tandem.BuildOptions | None
) -> torch.nn.Module:
    torch.manual_seed(0)
    module = kind().eval()
    return tandem.fake_quantize(
        module,
        torch.zeros(1, 3, SIZE, SIZE),
        calibration=ranges_of(module, profile),
        profile=profile,
        options=options,
    )


def train(network: torch.nn.Module, steps: int) -> list[float]:
    """Pull all outputs towards 1/2; return the losses."""
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    x = torch.from_numpy(np.concatenate(inputs(2, 1)))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = network(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum(((y - 0.5) ** 2).mean() for y in outputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def differences(
    network: torch.nn.Module,
    folder: Path,
    profile: str,
    options: tandem.BuildOptions | None = None,
    *,
    dla: str = "exact",
) -> list[np.ndarray]:
    """Build the network as it is; return the engine's outputs less those of PyTorch."""
    result = tandem.build(
        network.model(),
        folder / "tuned.engine",
        profile=profile,
        calibration=network.table(),
        options=options,
    )
    by_sample: list[list[np.ndarray]] = []
    with tandem.open_session(result.path, dla=dla) as session:
        for sample in inputs(6, 2):
            engine = session.infer({session.inputs[0].name: sample})
            with torch.no_grad():
                outputs = network(torch.from_numpy(sample))
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            names = [tensor.name for tensor in session.outputs]
            assert all(engine[name].std() > 0 for name in names)
            pairs = zip(names, outputs, strict=True)
            by_sample.append([engine[name] - output.numpy() for name, output in pairs])
    return [np.concatenate(parts) for parts in zip(*by_sample, strict=True)]


@pytest.mark.parametrize("kind", [Residual, pytest.param(Gated, marks=pytest.mark.slow)])
def test_on_a_dla_every_number_is_the_engines(kind: type[torch.nn.Module], tmp_path: Path) -> None:
    network = prepared(kind, BOARD, ALL_ON_DLA)
    before = differences(network, tmp_path, BOARD, ALL_ON_DLA)
    losses = train(network, 4)
    after = differences(network, tmp_path, BOARD, ALL_ON_DLA)
    assert losses[-1] < losses[0]
    assert [np.count_nonzero(part) for part in (*before, *after)] == [0] * 2 * len(before)
    assert sum(part.size for part in before) > 1000


def test_the_numbers_are_the_dlas_and_not_those_of_onnxruntime(tmp_path: Path) -> None:
    network = prepared(Residual, BOARD, ALL_ON_DLA)
    maps, _ = differences(network, tmp_path, BOARD, ALL_ON_DLA, dla="portable")
    assert np.count_nonzero(maps) > 0.01 * maps.size


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize(
    "profile", ["orin-nano-8gb", pytest.param("laptop", marks=pytest.mark.slow)]
)
def test_elsewhere_only_values_next_to_a_half_round_to_the_other_side(
    profile: str, tmp_path: Path
) -> None:
    network = prepared(Pooled, profile)
    train(network, 2)
    (values,) = differences(network, tmp_path, profile)
    table = network.table()
    steps = np.abs(values) / (max(table.tensors[name] for name in ("relu", "max_pool2d")) / 127)
    assert steps.max() < 1.001
    assert np.count_nonzero(steps > 0.5) <= 1e-4 * steps.size


def test_parameters_have_the_names_of_the_module_which_stays_as_it_is() -> None:
    torch.manual_seed(0)
    module = Residual().eval()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    network = tandem.fake_quantize(
        tandem.TorchModel(module, (torch.zeros(1, 3, SIZE, SIZE),)),
        calibration=ranges_of(module, "laptop"),
        profile="laptop",
    )
    names = {name.removeprefix("network.") for name, _ in network.named_parameters()}
    assert {"stem.weight", "body.weight", "body.bias", "head.weight", "head.bias"} <= names
    assert torch.equal(network.get_parameter("network.body.weight"), module.body.weight)
    factor = module.norm.weight / torch.sqrt(module.norm.running_var + module.norm.eps)
    folded = module.stem.weight * factor[:, None, None, None]
    assert torch.allclose(network.get_parameter("network.stem.weight"), folded)
    train(network, 1)
    assert not torch.equal(network.get_parameter("network.body.weight"), module.body.weight)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


def test_gradients_end_where_int8_clips() -> None:
    network = prepared(Pooled, "laptop")
    limit = network.table().tensors["x"]
    x = torch.from_numpy(inputs(1, 3)[0]).clamp(-0.9 * limit, 0.9 * limit)
    x[..., 0] = 1.5 * limit
    x.requires_grad_()
    network(x).sum().backward()
    assert torch.count_nonzero(x.grad[..., 0]) == 0
    assert torch.count_nonzero(x.grad[..., 1:]) > 0.5 * x.grad[..., 1:].numel()


def test_a_batch_is_what_its_samples_are() -> None:
    network = prepared(Residual, BOARD, ALL_ON_DLA)
    samples = [torch.from_numpy(sample) for sample in inputs(3, 4)]
    batch = network(torch.cat(samples))
    for index, sample in enumerate(samples):
        for whole, alone in zip(batch, network(sample), strict=True):
            assert torch.equal(whole[index : index + 1], alone)


def test_an_onnx_file_is_tuned_and_its_weights_are_written_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Pooled().eval()
    file = tmp_path / "pooled.onnx"
    torch.onnx.export(module, (torch.zeros(1, 3, SIZE, SIZE),), file, verbose=False)
    table = tandem.calibrate(file, inputs(2, 0), method="minmax", accept_loss=True)
    network = tandem.fake_quantize(file, calibration=table, profile="laptop")
    train(network, 1)
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in network.model().graph.initializer}
    for name, parameter in network.network.named_parameters():
        assert np.array_equal(weights[name], parameter.detach().numpy())
    assert network.table().tensors == table.tensors


def test_names_that_pytorch_refuses_are_changed_and_written_back_as_they_were(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    layers = (  # weight and bias of each layer: in the model, and in PyTorch
        {"a..b": "a._.b", "training": "training_"},
        {"training.weight": "training__.weight", "training.bias": "training__.bias"},
        {".weight": "_.weight", "a": "a_"},
        {"forward.w": "forward_.w", "a._.b": "a._.b_"},
    )
    nodes = [
        onnx.helper.make_node("Conv", [f"x{at}", *names], [f"x{at + 1}"], name=f"conv{at}")
        for at, names in enumerate(layers)
    ]
    weights = [
        onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
        for names in layers
        for name, shape in zip(names, ((3, 3, 1, 1), (3,)), strict=True)
    ]
    ports = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (1, 3, SIZE, SIZE))
        for name in ("x0", f"x{len(layers)}")
    ]
    graph = onnx.helper.make_graph(nodes, "names", ports[:1], ports[1:], weights)
    file = tmp_path / "names.onnx"
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), file)
    table = tandem.calibrate(file, inputs(2, 0), method="minmax", accept_loss=True)
    network = tandem.fake_quantize(file, calibration=table, profile="laptop")
    train(network, 1)
    tuned = {t.name: onnx.numpy_helper.to_array(t) for t in network.model().graph.initializer}
    names = {name: path for layer in layers for name, path in layer.items()}
    parameters = dict(network.network.named_parameters())
    assert set(parameters) == set(names.values())
    for name, path in names.items():
        assert np.array_equal(tuned[name], parameters[path].detach().numpy())


def test_what_does_not_fit_is_refused_by_name() -> None:
    network = prepared(Pooled, "laptop")
    with pytest.raises(tandem.TandemError, match=r"\(1, 3, 20, 24\).*'x'.*\(1, 3, 24, 24\)"):
        network(torch.zeros(1, 3, 20, SIZE))

    class Sorted(Pooled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.topk(super().forward(x), 3).values

    with pytest.raises(tandem.TandemError, match=r"\(TopK\) has no gradient"):
        prepared(Sorted, "laptop")
