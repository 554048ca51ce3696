"""Make the files beside this one: one small network, quantized by tools that the tests lack.

python -m pip install nncf==3.4.0 brevitas==0.13.4 torchao==0.18.0 onnxoptimizer
python tests/data/quantized_elsewhere/make.py nncf brevitas torchao

Each of these in an environment of its own, on a CPU (of ModelOpt without its extra `onnx`, which
asks for onnxruntime-gpu and cupy: onnx 1.21, onnxruntime 1.24.4 and onnx-graphsurgeon instead):

python -m pip install aimet-onnx==2.42.0
python tests/data/quantized_elsewhere/make.py aimet
python -m pip install nvidia-modelopt==0.47.0
python tests/data/quantized_elsewhere/make.py modelopt
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

FOLDER = Path(__file__).parent
torch.manual_seed(0)
SAMPLES = [torch.randn(1, 3, 12, 12) for _ in range(4)]


class Net(nn.Module):
    """A dense, a depthwise and a pointwise convolution, a sum, a mean and a GEMM."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run = self.layers
        a = run["relu0"](run["stem"](run["input"](x)))
        b = run["relu1"](run["depthwise"](a))
        c = run["sum"](run["pointwise"](b) + a)
        result: torch.Tensor = run["gemm"](c.mean((2, 3)))
        return result


class Products(nn.Module):
    """Two products with constant matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(64, 32) / 8)
        self.second = nn.Parameter(torch.randn(32, 16) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.first) @ self.second


def float_net(width: int = 16) -> Net:
    return Net(
        {
            "input": nn.Identity(),
            "stem": nn.Conv2d(3, width, 3, padding=1, stride=2),
            "relu0": nn.ReLU(),
            "depthwise": nn.Conv2d(width, width, 3, padding=1, groups=width),
            "relu1": nn.ReLU(),
            "pointwise": nn.Conv2d(width, width, 1),
            "sum": nn.Identity(),
            "gemm": nn.Linear(width, 10),
        }
    ).eval()


def save(name: str, model: onnx.ModelProto) -> None:
    for node in model.graph.node:  # stack traces of the exporter
        del node.metadata_props[:]
    del model.metadata_props[:], model.graph.metadata_props[:]
    if "modelopt" not in name:  # whose Casts say more with the types of what they read
        del model.graph.value_info[:]
    onnx.save(model, FOLDER / f"{name}.onnx")


def exported(net: nn.Module, sample: torch.Tensor) -> onnx.ModelProto:
    path = FOLDER / "plain.onnx"
    torch.onnx.export(
        net, (sample,), path, opset_version=17, input_names=["x"], output_names=["y"], dynamo=False
    )
    model = onnx.load(path)
    path.unlink()
    return model


def by_nncf() -> None:
    import nncf

    data = nncf.Dataset(SAMPLES, lambda x: {"x": x.numpy()})
    for preset in (nncf.QuantizationPreset.PERFORMANCE, nncf.QuantizationPreset.MIXED):
        plain = exported(float_net(), SAMPLES[0])
        model = nncf.quantize(plain, data, preset=preset, subset_size=4)
        save(f"nncf_{preset.value}", model)
    for mode in (nncf.CompressWeightsMode.INT8_ASYM, nncf.CompressWeightsMode.INT4_SYM):
        plain = onnx.version_converter.convert_version(exported(Products(), torch.randn(3, 64)), 21)
        grouped: dict[str, Any] = {}
        if mode == nncf.CompressWeightsMode.INT4_SYM:
            grouped = {"group_size": 16, "ratio": 1.0, "all_layers": True}
        save(f"nncf_{mode.value}", nncf.compress_weights(plain, mode=mode, **grouped))


def by_brevitas() -> None:
    import brevitas.nn as qnn
    from brevitas.export import export_onnx_qcdq
    from brevitas.quant import (
        Int8ActPerTensorFloat,
        Int8WeightPerChannelFloat,
        Int8WeightPerTensorFloat,
        Uint8ActPerTensorFloat,
    )

    each = {"weight_quant": Int8WeightPerChannelFloat}
    four = {"weight_quant": Int8WeightPerTensorFloat, "weight_bit_width": 4}
    net = Net(
        {
            "input": qnn.QuantIdentity(act_quant=Int8ActPerTensorFloat),
            "stem": qnn.QuantConv2d(3, 16, 3, padding=1, stride=2, **each),
            "relu0": qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat),
            "depthwise": qnn.QuantConv2d(16, 16, 3, padding=1, groups=16, **each),
            "relu1": qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat),
            "pointwise": qnn.QuantConv2d(16, 16, 1, **four),
            "sum": qnn.QuantIdentity(act_quant=Int8ActPerTensorFloat),
            "gemm": qnn.QuantLinear(16, 10, bias=True, **each),
        }
    ).train()
    for _ in range(80):
        for sample in SAMPLES:
            net(sample)
    path = FOLDER / "brevitas.onnx"
    options = {"opset_version": 17, "dynamo": False, "input_names": ["x"]}
    export_onnx_qcdq(net.eval(), SAMPLES[0], path, **options)
    save("brevitas", onnx.load(path))


def by_torchao() -> None:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    program = torch.export.export(float_net(), (SAMPLES[0],)).module()
    prepared = prepare_pt2e(program, quantizer)
    for sample in SAMPLES:
        prepared(sample)
    converted = torch.export.export(convert_pt2e(prepared), (SAMPLES[0],))
    onnx_program = torch.onnx.export(converted, dynamo=True, opset_version=18, input_names=["x"])
    assert onnx_program is not None
    save("torchao_pt2e", onnx_program.model_proto)


def by_aimet() -> None:
    from aimet_onnx import QuantizationSimModel
    from aimet_onnx.quantsim import set_blockwise_quantization_for_weights

    def simulated(plain: onnx.ModelProto, samples: list[torch.Tensor], **types: Any) -> Any:
        sim = QuantizationSimModel(plain, providers=["CPUExecutionProvider"], **types)
        if types["param_type"] == "int4":
            for name in sim.activation_names:
                sim.qc_quantize_op_dict[name].enabled = False
            set_blockwise_quantization_for_weights(sim, "MatMul", 4, True, 16)
        sim.compute_encodings([{"x": sample.numpy()} for sample in samples])
        return sim

    plain = exported(float_net(), SAMPLES[0])
    eight = simulated(plain, SAMPLES, param_type="int8", activation_type="int8")
    save("aimet", eight.to_onnx_qdq())
    whole = {"prequantize_constants": True, "export_int32_bias": True}
    save("aimet_int32_bias", eight.to_onnx_qdq(force_activation_as="signed", **whole))
    eight.export(str(FOLDER), "aimet", export_model=False)
    sixteen = simulated(
        exported(float_net(), SAMPLES[0]), SAMPLES, param_type="int8", activation_type="int16"
    )
    save("aimet_int16", sixteen.to_onnx_qdq())
    samples = [torch.randn(3, 64) for _ in range(4)]
    products = exported(Products(), samples[0])
    four = simulated(products, samples, param_type="int4", activation_type="int16")
    save("aimet_int4", four.to_onnx_qdq(prequantize_constants=True))


def by_modelopt() -> None:
    from modelopt.onnx import quantization

    images = torch.cat(SAMPLES).numpy()
    rows = torch.randn(3, 64).numpy()
    cases: list[tuple[str, nn.Module, Any, dict[str, Any]]] = [
        ("int8", float_net(), images, {"quantize_mode": "int8"}),
        ("int8_fp32", float_net(), images, {"quantize_mode": "int8"}),
        ("int8_dla", float_net(), images, {"quantize_mode": "int8", "target_dla": True}),
        ("fp8_fp32", float_net(32), images, {"quantize_mode": "fp8"}),
        ("int4_awq_clip", Products(), rows, {"calibration_method": "awq_clip"}),
        ("uint4_awq_lite", Products(), rows, {"calibration_method": "awq_lite"}),
    ]
    path = FOLDER / "float.onnx"
    for name, net, data, options in cases:
        onnx.save(exported(net, torch.from_numpy(data[:1] if data.ndim == 4 else data)), path)
        if "int4" in name:
            options |= {"quantize_mode": "int4", "block_size": 32}
            options["use_zero_point"] = name.startswith("uint4")
        if name.endswith("fp32"):
            options["high_precision_dtype"] = "fp32"
        quantization.quantize(
            str(path),
            calibration_data={"x": data},
            calibration_eps=["cpu"],
            output_path=str(FOLDER / "quantized.onnx"),
            **options,
        )
        save(f"modelopt_{name}", onnx.load(FOLDER / "quantized.onnx"))
    for temporary in (path, FOLDER / "quantized.onnx"):
        temporary.unlink()


BY = {
    "nncf": by_nncf,
    "brevitas": by_brevitas,
    "torchao": by_torchao,
    "aimet": by_aimet,
    "modelopt": by_modelopt,
}

if __name__ == "__main__":
    np.random.seed(0)
    for tool in sys.argv[1:]:
        BY[tool]()
