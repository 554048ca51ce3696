"""Sizes in a manifest that dynamic dimensions decide: a number, or a formula in text.

A formula holds whole numbers, the dimensions d0, d1, ... in the manifest's order, + - * // (rounds
down) and brackets, such as "4*d0*((d1+1)//2)". It is read into a row of steps for a stack, so that
no text, however deep, makes this program recurse.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Union

Amount = Union[int, str]  # noqa: UP007  (msgspec reads it at run time)

MAX_CHARACTERS = 2000  # of one formula: those of networks have tens
_MAX_VALUE = 2**62  # of any value on the way
_TOKEN = re.compile(r"d?[0-9]{1,18}|//|[-+*()]")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "//": 2}
_AFTER_VALUE = (*_PRECEDENCE, ")")

Step = Union[int, str]  # noqa: UP007  (a number, "d0", or an operator on the two values before it)


def evaluate(amount: Amount, point: Sequence[int]) -> int:
    """Return the value where dimension i is point[i].

    Raises ValueError: no formula, an unknown dimension, a divisor below 1 or a value beyond 2^62.
    """
    if isinstance(amount, int):
        return amount
    stack: list[int] = []
    for step in _steps(amount):
        if isinstance(step, int):
            stack.append(step)
        elif step.startswith("d"):
            index = int(step[1:])
            if index >= len(point):
                raise ValueError(f"{amount!r} has {step}; there are {len(point)} dimensions")
            stack.append(point[index])
        else:
            right = stack.pop()
            stack.append(_apply(step, stack.pop(), right, amount))
    return stack[0]


def _apply(operator: str, first: int, second: int, amount: str) -> int:
    if operator == "//" and second < 1:
        raise ValueError(f"{amount!r} divides by {second}")
    value = (
        first + second
        if operator == "+"
        else first - second
        if operator == "-"
        else first * second
        if operator == "*"
        else first // second
    )
    if abs(value) > _MAX_VALUE:
        raise ValueError(f"{amount!r} is beyond 2^62")
    return value


@lru_cache(1 << 14)
def _steps(text: str) -> tuple[Step, ...]:
    """Return the formula in postfix order (Dijkstra's shunting yard)."""
    postfix: list[Step] = []
    operators: list[str] = []
    for token in _tokens(text):
        if token == "(":
            operators.append(token)
        elif token == ")":
            while operators[-1] != "(":
                postfix.append(operators.pop())
            operators.pop()
        elif token in _PRECEDENCE:
            while operators and _PRECEDENCE.get(operators[-1], 0) >= _PRECEDENCE[token]:
                postfix.append(operators.pop())
            operators.append(token)
        else:
            postfix.append(token if token.startswith("d") else int(token))
    return (*postfix, *reversed(operators))


def _tokens(text: str) -> list[str]:
    """Return the parts of a formula: values with operators between them, brackets in pairs."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"a formula has {len(text)} characters, the limit is {MAX_CHARACTERS}")
    tokens = _TOKEN.findall(text)
    open_brackets, wants_value = 0, True
    for token in tokens:
        if wants_value == (token in _AFTER_VALUE):
            raise ValueError(f"{text!r} is no formula: {token!r} is out of place")
        open_brackets += (token == "(") - (token == ")")
        if open_brackets < 0:
            break
        wants_value = token == "(" or token in _PRECEDENCE
    if "".join(tokens) != text or wants_value or open_brackets:
        raise ValueError(f"{text!r} is no formula")
    return tokens
