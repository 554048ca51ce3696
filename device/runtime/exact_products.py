"""Sessions of onnxruntime whose products of INT8 are exact on every CPU."""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_EXACT_PRODUCTS = ("session.x64quantprecision", "1")
_WRONG_OPTIMIZERS = ("ReluQuantRewrite",)  # drops a Relu before a QuantizeLinear to FP8
_FLOAT_PRODUCTS = ("session.disable_quant_qdq", "1")


def int8_products_saturate(machine: str, flags: frozenset[str]) -> bool:
    """Whether the CPU's fast INT8 products saturate at 16 bits: quick and wrong.

    So they do on x86 without VNNI. The exact way costs twice the time, so it is taken only there.
    """
    return machine in {"x86_64", "AMD64"} and not flags & {"avx512_vnni", "avx_vnni"}


def exact_session(
    model: bytes | str,
    options: Any,  # noqa: ANN401  (onnxruntime is imported by who calls)
    disabled_optimizers: Sequence[str] = (),
) -> Any:  # noqa: ANN401
    """Start a session on the CPU, with SessionOptions; raises what onnxruntime raises.

    Its exact products fail where nodes share weights: it stores them anew for each node, under one
    name. 1.30 also fuses products between Q/DQ of FP8 into operators that take integers alone.
    There the nodes between Q/DQ pairs run in float, which is exact, too, and slower.
    """
    from onnxruntime import InferenceSession
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidGraph

    def start() -> Any:  # noqa: ANN401
        return InferenceSession(
            model,
            options,
            providers=["CPUExecutionProvider"],
            enable_fallback=False,  # it would print to stdout and try the same again
            disabled_optimizers=[*_WRONG_OPTIMIZERS, *disabled_optimizers],
        )

    if int8_products_saturate(platform.machine(), cpu_flags()):
        options.add_session_config_entry(*_EXACT_PRODUCTS)
    try:
        return start()
    except (Fail, InvalidGraph):
        options.add_session_config_entry(*_FLOAT_PRODUCTS)
        return start()


def cpu_flags() -> frozenset[str]:
    """The CPU's features as Linux names them; empty where they cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((row for row in text.splitlines() if row.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())
