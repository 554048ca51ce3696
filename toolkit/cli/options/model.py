"""The options of the commands that read a model: how its file is to be read."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def layout_option(command: F) -> F:
    """Add --inputs-as-nchw."""
    option = click.option(
        "--inputs-as-nchw",
        is_flag=True,
        help="Give a TensorFlow or Keras model inputs [N,C,H,W] in place of its own [N,H,W,C].",
    )
    return option(command)
