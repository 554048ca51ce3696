"""The JSON of an exported program -> what in it PyTorch might run as code.

Every text is judged by the row of its field; a field without a row holds plain names. Keys of
dictionaries are texts, too.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from toolkit.importers.pt2 import text as t


@dataclass(frozen=True, slots=True)
class Rule:
    """What the texts of a field may be, in words and as a check."""

    allowed: str
    holds: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A text of a program that its field does not allow. `field` is the path in the JSON."""

    field: str
    value: str
    allowed: str


_PLAIN = Rule("a plain name", t.is_plain)
_NAME = Rule("an identifier", t.is_name)
_ANY = Rule("any text", lambda text: True)
_SYMBOL = Rule("a symbol such as s0", t.is_symbol)
_CONSTANT = Rule("a text without quotes", t.is_quotable)
_TREE = Rule("nested tuples, lists and dicts", t.is_tree)
_OPERATOR = f"an operator of torch.ops.{{{','.join(t.OPERATOR_NAMESPACES)}}} or arithmetic on sizes"

FIELDS: Mapping[str, Rule] = {
    "expr_str": Rule("an expression of numbers, symbols and known functions", t.is_expression),
    "guards_code": Rule("a comparison of sizes of inputs", t.is_guard),
    "in_spec": _TREE,
    "out_spec": _TREE,
    "name": _NAME,
    "as_name": _NAME,
    "forward_arg_names": _NAME,
    "field_names": _NAME,
    "as_string": _CONSTANT,
    "as_strings": _CONSTANT,
    # Metadata of nodes, which PyTorch splits and shows.
    "stack_trace": _ANY,
    "nn_module_stack": _ANY,
    "torch_fn": _ANY,
    "custom": _ANY,
    "from_node": _ANY,
    "source_fn_stack": Rule("dotted names", t.is_source_stack),
}
# Dictionaries whose keys are more than plain names.
KEYS: Mapping[str, Rule] = {
    "range_constraints": _SYMBOL,
    "tensor_values": _NAME,
    "sym_int_values": _NAME,
    "sym_float_values": _NAME,
    "sym_bool_values": _NAME,
    "custom_obj_values": _NAME,
}


def find_suspect(program: object, operators: Container[str]) -> Suspect | None:
    """Return the first text of a program that is not allowed where it stands.

    `program` is the JSON as Python objects, `operators` the names of PyTorch's dispatcher.
    """
    operator = Rule(_OPERATOR, partial(t.is_operator, registered=operators))
    fields = {**FIELDS, "target": operator, "as_operator": operator}
    return next(_suspects(program, "", "", fields), None)


def _suspects(
    value: object, field: str, path: str, fields: Mapping[str, Rule]
) -> Iterator[Suspect]:
    """Yield what is not allowed in `value`, the content of `field`, in the order of the file."""
    if isinstance(value, str):
        rule = fields.get(field, _PLAIN)
        if not rule.holds(value):
            yield Suspect(path, value, rule.allowed)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _suspects(item, field, f"{path}[{index}]", fields)
    elif isinstance(value, dict):
        for key, item in value.items():
            rule = KEYS.get(field, _PLAIN)
            if not rule.holds(key):
                yield Suspect(path, key, rule.allowed)
            inner = _in_node(fields) if key == "nodes" else fields
            yield from _suspects(item, key, f"{path}.{key}" if path else key, inner)


def _in_node(fields: Mapping[str, Rule]) -> Mapping[str, Rule]:
    """Texts given to operators, such as messages, are quoted by PyTorch."""
    return {**fields, "as_string": _ANY, "as_strings": _ANY}
