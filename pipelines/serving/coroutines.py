"""Coroutines that run to their first wait without a task: most requests wait for nothing."""

import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


@types.coroutine
def resumed(
    coroutine: Coroutine[Any, None, T],
    future: Any,  # noqa: ANN401
) -> Generator[Any, None, T]:
    """Go on with a coroutine that ran to its first wait, which is for `future`."""
    while True:
        try:
            try:
                yield future
            except BaseException as error:  # noqa: BLE001  (of the future, or to cancel)
                future = coroutine.throw(error)
            else:
                future = coroutine.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
