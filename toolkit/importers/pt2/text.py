"""Allow-lists of the texts in an exported program. Pure: nothing is evaluated.

Each function takes a text and says whether it is harmless where PyTorch puts it.
"""

import ast
import json
import math
import re
from collections.abc import Container
from typing import Any

MAX_CHARACTERS = 20_000  # the longest expression of the networks in the tests has 283
MAX_PRECISION = 128  # bits of a float; PyTorch writes 53
MAX_EXPONENT = 64  # a larger one, of a number, is computed for hours

# Sizes (s0), integers and floats of data (u0, zuf0), as PyTorch names them.
_SYMBOL = re.compile(r"[a-z]{1,4}\d{1,6}")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?(inf|oo)|nan", re.ASCII)
# Fit for source code between quotes, and in names that PyTorch splits at dots.
_PLAIN = re.compile(r"[\w.\-+/ @:]*")
_KEY = re.compile(r"[\w.\-/ ]*")
_QUOTED = re.compile(r"[^'\"\\\x00-\x1f\x7f]*")
_DOTTED = re.compile(r"(\w+\.)*\w+")

_CONSTANTS = frozenset({"true", "false", "True", "False", "oo", "int_oo", "nan", "zoo", "pi", "E"})
_FUNCTIONS = frozenset(
    {
        *("Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "Max", "Min", "Abs"),
        *("Mod", "PythonMod", "FloorDiv", "CleanDiv", "CeilDiv", "IntTrueDiv", "FloatTrueDiv"),
        *("PowByNatural", "FloatPow", "ModularIndexing", "LShift", "RShift", "Identity", "Where"),
        *("CeilToInt", "FloorToInt", "TruncToInt", "RoundToInt", "TruncToFloat", "RoundDecimal"),
        *("ToFloat", "floor", "ceiling", "sqrt", "exp", "log", "sin", "cos", "tan", "atan"),
        *("Equality", "Unequality", "Eq", "Ne", "GreaterThan", "LessThan", "StrictGreaterThan"),
        *("StrictLessThan", "Ge", "Gt", "Le", "Lt", "And", "Or", "Not", "Piecewise"),
        *("ExprCondPair", "IsNonOverlappingAndDenseIndicator"),
    }
)
_POWERS = frozenset({"Pow", "PowByNatural", "FloatPow"})
_ARITHMETIC = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context),
)
_GUARD_FUNCTIONS = frozenset(
    {"max", "min", "abs", "round", "int", "float", "bool", "IsNonOverlappingAndDenseIndicator"}
)
_GUARD_METHODS = frozenset({"size", "stride", "storage_offset", "item"})
_GUARD_MODULE = re.compile(
    r"(math\.(ceil|floor|trunc|sqrt|log|log2|exp|sin|cos|tan|atan|pow)"
    r"|torch\._?sym_(float|int|not|max|min|ite|sqrt))"
)

SCALAR_OPERATORS = frozenset(
    {
        *(f"_operator.{name}" for name in ("eq", "ne", "le", "ge", "lt", "gt", "neg", "pos")),
        *(f"_operator.{name}" for name in ("add", "sub", "mul", "floordiv", "truediv", "mod")),
        *(f"_operator.{name}" for name in ("pow", "and_", "or_", "lshift", "rshift", "getitem")),
        *(f"math.{name}" for name in ("trunc", "ceil", "floor", "sqrt")),
        *(f"torch.{name}" for name in ("sym_float", "sym_int", "sym_not", "sym_ite", "sym_sum")),
        *(f"torch.{name}" for name in ("sym_max", "sym_min", "sym_sqrt", "_sym_sqrt")),
    }
)
# They take graphs of the same file, which are checked like it.
HIGHER_ORDER_OPERATORS = frozenset(
    {
        *("cond", "while_loop", "scan", "associative_scan", "map_impl", "invoke_subgraph"),
        *("wrap_with_set_grad_enabled", "wrap_with_autocast", "hints_wrapper", "out_dtype"),
        *("auto_functionalized", "auto_functionalized_v2", "flex_attention", "strict_mode"),
    }
)
OPERATOR_NAMESPACES = ("aten", "prims", "torchvision", "quantized_decomposed")
_FILE_OPERATORS = frozenset({"from_file"})  # maps a file of this machine, or makes one


def is_plain(text: str) -> bool:
    """Whether a text is a path, a device, a version or such: no quotes, brackets or assignments."""
    return bool(_PLAIN.fullmatch(text)) and not any(map(_is_dunder, text.split(".")))


def is_name(text: str) -> bool:
    """Whether a text is empty or an identifier, as which it gets into source code."""
    return not text or (text.isidentifier() and not _is_dunder(text))


def is_quotable(text: str) -> bool:
    """Whether a text stays a string between single quotes."""
    return bool(_QUOTED.fullmatch(text))


def is_symbol(text: str) -> bool:
    """Whether a text is a symbol of PyTorch, such as s0."""
    return bool(_SYMBOL.fullmatch(text))


def is_source_stack(text: str) -> bool:
    """Whether a text is pairs of a name and a dotted name that PyTorch looks up."""
    return all(
        _DOTTED.fullmatch(name) and not any(map(_is_dunder, name.split(".")))
        for pair in text.split(";")
        for name in pair.split(",")
    )


def is_operator(text: str, registered: Container[str]) -> bool:
    """Whether a text names an operator that computes and does no more.

    `registered` has the names of PyTorch's dispatcher, such as "aten::add.Tensor".
    """
    if text in SCALAR_OPERATORS:
        return True
    namespace, name, overload = (*text.removeprefix("torch.ops.").split("."), "", "")[:3]
    if text == f"torch.ops.higher_order.{name}":
        return name in HIGHER_ORDER_OPERATORS
    full = f"{namespace}::{name}" + ("" if overload == "default" else f".{overload}")
    return (
        text == f"torch.ops.{namespace}.{name}.{overload}"
        and namespace in OPERATOR_NAMESPACES
        and name not in _FILE_OPERATORS
        and full in registered
    )


def is_expression(text: str) -> bool:
    """Whether a text is an expression of numbers, symbols and known functions."""
    tree = _parse(text)
    return tree is not None and _is_quick(tree) and all(map(_in_expression, ast.walk(tree)))


def is_guard(text: str) -> bool:
    """Whether a text compares sizes of inputs, as in L['x'].size()[0] == 2."""
    if any(mark in text for mark in '"#\\\n\r'):
        return False
    tree = _parse(text)
    return tree is not None and _is_quick(tree) and all(map(_in_guard, ast.walk(tree)))


def is_tree(text: str) -> bool:
    """Whether a text describes nested tuples, lists and dicts, and names no code."""
    try:
        _, root = json.loads(text)
        return _is_node(root)
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def _is_node(node: dict[str, Any]) -> bool:
    kind, context = node["type"], node["context"]
    return (
        (kind is None or (isinstance(kind, str) and is_plain(kind)))
        and (context is None or _is_context(context))
        and all(_is_node(child) for child in node["children_spec"])
    )


def _is_context(context: object) -> bool:
    """Keys of a dict, the length of a deque or the name of a type, most of them as JSON."""
    if not isinstance(context, str):
        return False
    try:
        keys = json.loads(context)
    except ValueError:
        keys = context
    return all(
        key is None or isinstance(key, (int, float)) or (isinstance(key, str) and _is_key(key))
        for key in (keys if isinstance(keys, list) else [keys])
    )


def _is_key(text: str) -> bool:
    return bool(_KEY.fullmatch(text)) and not _is_dunder(text)


def _is_dunder(text: str) -> bool:
    return text.startswith("__") and text.endswith("__")


def _parse(text: str) -> ast.Expression | None:
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        return ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _in_expression(node: ast.AST) -> bool:
    allowed = False
    match node:
        case ast.BinOp() | ast.BoolOp() | ast.UnaryOp():
            allowed = not _repeatable(node)
        case ast.Call(func=ast.Name(id=name)):
            allowed = name in _FUNCTIONS
        case ast.Name(id=name):
            allowed = is_symbol(name) or name in _CONSTANTS or name in _FUNCTIONS
        case ast.Constant(value=str() as text):
            allowed = is_symbol(text) or bool(_NUMBER.fullmatch(text))
        case ast.Constant(value=value):
            allowed = isinstance(value, (bool, int, float))
        case ast.keyword(arg="precision", value=ast.Constant(value=int() as bits)):  # of a Float
            allowed = bits <= MAX_PRECISION
        case ast.keyword(arg=name, value=ast.Constant(value=bool())):  # such as positive=True
            allowed = name is not None
        case _:
            allowed = isinstance(node, (*_ARITHMETIC, ast.Tuple))
    return allowed


def _is_quick(tree: ast.AST) -> bool:
    """Whether no power or shift makes a number of millions of digits."""
    try:
        return _degree(tree) <= MAX_EXPONENT
    except RecursionError:
        return False


def _degree(node: ast.AST) -> float:
    """The largest product of the exponents that stand on each other, as in (x**2)**3, 0 for none.

    A shift counts by itself. Infinite for exponents and shifts that are computed.
    """
    inner = max(map(_degree, ast.iter_child_nodes(node)), default=0.0)
    match node:
        case ast.BinOp(op=ast.Pow(), right=exponent):
            return max(inner, 1.0) * _exponent(exponent)
        case ast.Call(func=ast.Name(id=name), args=[_, *exponents]) if name in _POWERS:
            return max(inner, 1.0) * max(map(_exponent, exponents), default=1.0)
        case ast.BinOp(op=ast.LShift(), right=shift):
            return max(inner, _exponent(shift))
        case ast.Call(func=ast.Name(id="LShift"), args=[_, *shifts]):
            return max(inner, *map(_exponent, shifts))
    return inner


def _exponent(node: ast.expr) -> float:
    """The magnitude of an exponent: 1 for a symbol, infinite for what is not one number."""
    match node:
        case ast.Name() | ast.Call(func=ast.Name(id="Symbol")):
            return 1.0
        case ast.UnaryOp(operand=operand):
            return _exponent(operand)
        case ast.Call(func=ast.Name(id="Integer" | "Rational" | "Float"), args=operands):
            return max(map(_exponent, operands), default=math.inf)
        case ast.Constant(value=int() | float() as value):
            return math.inf if math.isnan(value) else abs(value)
        case ast.Constant(value=str() as text) if _NUMBER.fullmatch(text) and "oo" not in text:
            return abs(float(text))
    return math.inf


def _repeatable(node: ast.AST) -> bool:
    """Whether an operand is a text or a tuple: times a number, it takes any memory."""
    return any(
        isinstance(child, ast.Tuple)
        or (isinstance(child, ast.Constant) and isinstance(child.value, str))
        for child in ast.iter_child_nodes(node)
    )


def _in_guard(node: ast.AST) -> bool:
    allowed = False
    match node:
        case ast.BinOp() | ast.BoolOp() | ast.UnaryOp():
            allowed = not _repeatable(node)
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            allowed = name in _GUARD_FUNCTIONS and not _repeatable(node)
        case ast.Attribute(value=ast.Name(id="math" | "torch" as module), attr=name):
            allowed = bool(_GUARD_MODULE.fullmatch(f"{module}.{name}"))
        case ast.Attribute(attr=name):
            allowed = name in _GUARD_METHODS
        case ast.Name(id=name):
            allowed = name in ("L", "math", "torch", "inf") or name in _GUARD_FUNCTIONS
        case ast.Constant(value=str() as text):
            allowed = _is_key(text)
        case ast.Constant(value=value):
            allowed = value is None or isinstance(value, (bool, int, float))
        case ast.Call(func=function, keywords=keywords):  # of an attribute that is allowed itself
            named = isinstance(function, ast.Attribute) and not keywords
            allowed = named and not _repeatable(node)
        case _:
            allowed = isinstance(node, (*_ARITHMETIC, ast.Subscript))
    return allowed
