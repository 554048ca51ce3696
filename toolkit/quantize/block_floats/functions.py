"""TensorRT's operators for activations in blocks, as functions of ONNX's own.

A model that holds them is valid and runs in ONNX's reference evaluator. TensorRT's importer looks
for an operator of its own before it looks for a function, so that it does not read these.

The exponent of E8M0 is found from a logarithm that may be off by one, and raised until it fits.
"""

import onnx
import onnx.parser
import onnx_ir as ir

from toolkit.quantize.block_floats.formats import (
    EXPONENT_BIAS,
    LOWEST_EXPONENT,
    SMALLEST_BLOCK_SCALE,
    BlockFormat,
)

TENSORRT = "trt"
SIMULATED = "block_floats"
"""Domain of the functions that round to a format and back, in float32."""

_CUT = """
    rows = Constant <value_ints = [-1, {block}]> ()
    last = Constant <value_ints = [1]> ()
    shape = Shape (x)
    cut = Reshape (x, rows)
    sizes = Abs (cut)
    amax = ReduceMax <keepdims = 1> (sizes, last)
    head = Shape <end = -1> (x)
    rest = Constant <value_ints = [-1]> ()
    scale_shape = Concat <axis = 0> (head, rest)
"""
_EXPONENT = f"""
    most = Constant <value_float = 448.0> ()
    two = Constant <value_float = 2.0> ()
    one = Constant <value_float = 1.0> ()
    lowest = Constant <value_float = {LOWEST_EXPONENT}.0> ()
    tiny = Constant <value_float = 1.1754944e-38> ()
    largest = Constant <value_float = 3.4028235e38> ()
    above = Max (amax, tiny)
    finite = Min (above, largest)
    part = Div (finite, most)
    log = Log (part)
    log_two = Log (two)
    log2 = Div (log, log_two)
    floored = Floor (log2)
    lower = Sub (floored, one)
    e0 = Max (lower, lowest)
"""
_RAISE = """
    power{n} = Pow (two, e{n})
    limit{n} = Mul (most, power{n})
    larger{n} = Greater (amax, limit{n})
    more{n} = Cast <to = 1> (larger{n})
    e{m} = Add (e{n}, more{n})
"""
_EIGHT_BITS = """
    step = Pow (two, e3)
    divided = Div (cut, step)
    least = Neg (most)
    clipped = Clip (divided, least, most)
"""
_FOUR_BITS = f"""
    six = Constant <value_float = 6.0> ()
    most = Constant <value_float = 448.0> ()
    smallest = Constant <value_float = {SMALLEST_BLOCK_SCALE}> ()
    zero = Constant <value_float = 0.0> ()
    half = Constant <value_float = 0.5> ()
    one = Constant <value_float = 1.0> ()
    two = Constant <value_float = 2.0> ()
    four = Constant <value_float = 4.0> ()
    sixths = Div (amax, six)
    wished = Div (sixths, scale)
    bounded = Clip (wished, smallest, most)
    narrow = Cast <to = 17> (bounded)
    wide = Cast <to = 1> (narrow)
    step = Mul (wide, scale)
    divided = Div (cut, step)
    least = Neg (six)
    clipped = Clip (divided, least, six)
    far = Abs (clipped)
    from_two = GreaterOrEqual (far, two)
    from_four = GreaterOrEqual (far, four)
    wider = Where (from_four, two, one)
    spacing = Where (from_two, wider, half)
    spaces = Div (clipped, spacing)
    rounded = Round (spaces)
    numbers = Mul (rounded, spacing)
"""
_ENDS = {
    ("MXFP8", SIMULATED): """
    stored = Cast <to = 17> (clipped)
    numbers = Cast <to = 1> (stored)
    restored = Mul (numbers, step)
    y = Reshape (restored, shape)
""",
    ("NVFP4", SIMULATED): """
    restored = Mul (numbers, step)
    y = Reshape (restored, shape)
""",
    ("MXFP8", TENSORRT): f"""
    whole = Reshape (clipped, shape)
    y = Cast <to = 17> (whole)
    bias = Constant <value_float = {EXPONENT_BIAS}.0> ()
    biased = Add (e3, bias)
    exponents = Reshape (biased, scale_shape)
    scales = Cast <to = 2> (exponents)
""",
    ("NVFP4", TENSORRT): """
    whole = Reshape (numbers, shape)
    y = Cast <to = 23> (whole)
    block_scales = Reshape (bounded, scale_shape)
    scales = Cast <to = 17> (block_scales)
""",
}
_RESTORE = f"""
    two = Constant <value_float = 2.0> ()
    bias = Constant <value_float = {EXPONENT_BIAS}.0> ()
    biased = Cast <to = 1> (scales)
    exponents = Sub (biased, bias)
    steps = Pow (two, exponents)
    y = DequantizeLinear <axis: int = @axis, block_size: int = @block_size> (x, steps)
"""
_ATTRIBUTES = {"MXFP8": "axis, block_size, output_dtype", "NVFP4": "axis, block_size, scale_type"}
QUANTIZERS = {"MXFP8": "TRT_MXFP8DynamicQuantize", "NVFP4": "TRT_FP4DynamicQuantize"}
RESTORER = "TRT_MXFP8DequantizeLinear"


def round_trip(form: BlockFormat, opset: int) -> ir.Function:
    """Return the function that rounds x [..., depth], of NVFP4 with a scale [], in float32."""
    inputs = "x, scale" if form.ranged else "x"
    head = f"{form.name} ({inputs}) => (y)"
    return _function(SIMULATED, head, _body(form, SIMULATED), opset)


def quantizer(form: BlockFormat, opset: int) -> ir.Function:
    """Return TensorRT's dynamic quantization of x along its last axis: numbers and scales."""
    inputs = "x, scale" if form.ranged else "x"
    name, attributes = QUANTIZERS[form.name], _ATTRIBUTES[form.name]
    head = f"{name} <{attributes}> ({inputs}) => (y, scales)"
    return _function(TENSORRT, head, _body(form, TENSORRT), opset)


def restorer(opset: int) -> ir.Function:
    """Return TensorRT's dequantization of MXFP8."""
    head = f"{RESTORER} <{_ATTRIBUTES['MXFP8']}> (x, scales) => (y)"
    return _function(TENSORRT, head, _RESTORE, opset)


def _body(form: BlockFormat, domain: str) -> str:
    exponent = _EXPONENT + "".join(_RAISE.format(n=n, m=n + 1) for n in range(3)) + _EIGHT_BITS
    middle = _FOUR_BITS if form.ranged else exponent
    return _CUT.format(block=form.block) + middle + _ENDS[form.name, domain]


def _function(domain: str, head: str, body: str, opset: int) -> ir.Function:
    opsets = f'<opset_import: ["" : {opset}], domain: "{domain}">'
    return ir.from_proto(onnx.parser.parse_function(f"{opsets} {head} {{{body}}}"))
