"""A command from a frozen dataclass: each field is an option or an argument of the command line.

    @dataclass(frozen=True, slots=True)
    class Show:
        \"\"\"Show a MODEL.

        Example: tandem show model.onnx
        \"\"\"

        model: Path = argument(type=PATH)
        samples: int | None = option("Number of samples.", min=1)  # --samples
        inputs: InputOptions = part("Inputs")  # the fields of another dataclass, under this title

    show = command(Show, "show:show")

The field's type gives the option's: `bool` is a flag, `Literal` a choice, `tuple[str, ...]` an
option that may be given again. The module of the action is imported when the command runs, so that
`--help` and usage errors load neither onnx nor numpy. The action gets one value of the dataclass.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click
from click.shell_completion import CompletionItem

T = TypeVar("T")
Complete = Callable[[click.Context, click.Parameter, str], list[str] | list[CompletionItem]]

PATH = click.Path(path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)
NEW_FOLDER = click.Path(file_okay=False, path_type=Path)


class FiniteRange(click.FloatRange):
    """click.FloatRange without "inf" and "nan"."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401  (click's)
        """Return the number; fails as click's types do."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


def option(
    text: str | None,
    *flags: str,
    group: str = "",
    default: object = None,
    required: bool = False,
    show_default: bool | str = True,
    metavar: str | None = None,
    type: "click.ParamType[Any] | None" = None,  # noqa: A002  (click's name)
    min: float | None = None,  # noqa: A002
    max: float | None = None,  # noqa: A002
    min_open: bool = False,
    multiple: bool = False,
    parse: Callable[[Any], object] | None = None,
    complete: Complete | None = None,
    envvar: str | None = None,
    prompt: str | None = None,
) -> Any:  # noqa: ANN401  (a field of any type)
    """Return a field that is an option with a help text.

    `flags`: by default the field's name. `group`: its title in the help. `parse` turns what click
    gives, a text unless `type` is given, into the field's value, or raises click.BadParameter;
    `multiple`: it takes a tuple of them. `min_open`: `min` itself is refused.
    """
    return field(
        metadata={
            "is_argument": False, "help": text, "flags": flags, "group": group, "default": default,
            "required": required, "show_default": show_default, "metavar": metavar, "type": type,
            "min": min, "max": max, "min_open": min_open, "multiple": multiple, "parse": parse,
            "complete": complete, "envvar": envvar, "prompt": prompt,
        }
    )  # fmt: skip


def argument(
    metavar: str | None = None,
    *,
    type: "click.ParamType[Any] | None" = None,  # noqa: A002  (click's name)
    required: bool = True,
    default: object = None,
    nargs: int = 1,
    min: float | None = None,  # noqa: A002
    complete: Complete | None = None,
) -> Any:  # noqa: ANN401  (a field of any type)
    """Return a field that is an argument; `nargs` -1: any number of them."""
    return field(
        metadata={
            "is_argument": True, "metavar": metavar, "type": type, "required": required,
            "default": default, "nargs": nargs, "min": min, "complete": complete,
        }
    )  # fmt: skip


def part(group: str = "") -> Any:  # noqa: ANN401  (a field of any dataclass)
    """Return a field whose type is a dataclass of options; `group`: their title in the help."""
    return field(metadata={"group": group})


def json_option(text: str = "Print the result as JSON.", group: str = "") -> Any:  # noqa: ANN401
    """Return the field `as_json`."""
    return option(text, "--json", group=group)


class Command(click.Command):
    """A command whose help shows its options under the titles of their groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                title = parameter.group if isinstance(parameter, _Option) else ""
                sections.setdefault(title, []).append(record)
        for title in sorted(sections, key=lambda title: title == ""):  # those of no group last
            with formatter.section(title or "Options"):
                formatter.write_dl(sections[title])


def command(
    options: type[Any],
    action: str,
    *,
    first: str = "",
    name: str = "",
    text: str = "",
    cls: type[click.Command] = Command,
) -> click.Command:
    """Return the command of a dataclass; `action`: `module:function` below toolkit.cli.actions.

    The function takes a value of the dataclass. `first`: `package.module:function` that is called
    before the action's module is loaded, for what can run beside its imports. `name`: by default
    that of the function. `text`: by default the docstring of the dataclass; its last paragraph, the
    example, is the epilog.
    """
    text, epilog = _split(text or inspect.getdoc(options) or "")
    return cls(
        name or action.partition(":")[2],
        params=list(_parameters(options, "")),
        help=text,
        callback=partial(_act, options, action, first),
        epilog=epilog,
    )


def group(
    name: str, text: str, commands: Sequence[click.Command], cls: type[click.Group] = click.Group
) -> click.Group:
    """Return a group of commands, which its help lists in their order; `text`: as a docstring."""
    text, epilog = _split(inspect.cleandoc(text))
    return cls(name, {str(one.name): one for one in commands}, help=text, epilog=epilog)


def _split(text: str) -> tuple[str, str]:
    """Return a docstring without its last paragraph, and that one as an epilog."""
    text, _, example = text.rpartition("\n\n")
    return text, example if example.startswith("\b") else " ".join(example.split())


@contextmanager
def parsed(options: type[T], words: Sequence[str]) -> Iterator[T]:
    """Yield the value of a command's words, in its context. Raises click.ClickException."""
    with command(options, "").make_context(options.__name__.lower(), list(words)) as ctx:
        yield _value(options, ctx.params)


def given(name: str) -> bool:
    """Whether the command line or the environment gives a field of the running command."""
    source = click.get_current_context().get_parameter_source(name)
    return source is not click.core.ParameterSource.DEFAULT


def _act(options: type[Any], action: str, first: str, **values: object) -> None:
    if first:
        _function(first)()
    _function(f"toolkit.cli.actions.{action}")(_value(options, values))


def _function(name: str) -> Callable[..., None]:
    """Return a function by `package.module:function`."""
    module, _, function = name.partition(":")
    loaded: Callable[..., None] = getattr(import_module(module), function)
    return loaded


def _value(options: type[T], values: Mapping[str, object]) -> T:
    return options(
        **{
            name: values[name] if "is_argument" in metadata else _value(kind, values)
            for name, kind, metadata in _rows(options)
        }
    )


def _parameters(options: type[Any], title: str) -> Iterator[click.Parameter]:
    for name, kind, metadata in _rows(options):
        if "is_argument" not in metadata:
            yield from _parameters(kind, metadata["group"] or title)
        elif metadata["is_argument"]:
            yield _argument(name, kind, metadata)
        else:
            yield _option(name, kind, metadata, title)


def _rows(options: Any) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:  # noqa: ANN401
    """Yield name, type and metadata of the fields of a dataclass."""
    types = get_type_hints(options)
    for one in fields(options):
        yield one.name, types[one.name], one.metadata


class _Option(click.Option):
    group = ""


def _argument(name: str, kind: Any, metadata: Mapping[str, Any]) -> click.Argument:  # noqa: ANN401
    kind, _ = _element(kind)
    return click.Argument(
        [name],
        type=_click_type(kind, metadata),
        required=metadata["required"] and metadata["default"] is None,
        **_default(metadata),
        nargs=metadata["nargs"],
        metavar=metadata["metavar"],
        shell_complete=metadata["complete"],
    )


def _option(name: str, kind: Any, metadata: Mapping[str, Any], title: str) -> click.Option:  # noqa: ANN401
    kind, is_many = _element(kind)
    is_flag = kind is bool
    default, parse = metadata["default"], metadata["parse"]
    parameter = _Option(
        [name, *(metadata["flags"] or (f"--{name.replace('_', '-')}",))],
        type=None if is_flag else _click_type(kind, metadata),
        is_flag=is_flag or None,
        help=metadata["help"],
        **_default(metadata),
        required=metadata["required"],
        show_default=None if default in (None, "") else metadata["show_default"],
        metavar=metadata["metavar"],
        multiple=metadata["multiple"] or (is_many and parse is None),
        callback=None if parse is None else lambda _ctx, _param, value: parse(value),
        shell_complete=metadata["complete"],
        envvar=metadata["envvar"],
        show_envvar=metadata["envvar"] is not None,
        prompt=metadata["prompt"] or False,
    )
    parameter.group = metadata["group"] or title
    return parameter


def _default(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what click is told of the default: nothing, if there is none."""
    default = metadata["default"]
    return {} if default is None else {"default": default}


def _element(kind: Any) -> tuple[Any, bool]:  # noqa: ANN401  (a type)
    """Return a type without None, or the one that a tuple has any number of."""
    if get_origin(kind) in (Union, UnionType):
        kind = next(one for one in get_args(kind) if one is not NoneType)
    is_many = get_origin(kind) is tuple and get_args(kind)[-1] is ...
    return (get_args(kind)[0] if is_many else kind), is_many


def _click_type(kind: Any, metadata: Mapping[str, Any]) -> Any:  # noqa: ANN401  (as click has it)
    low, high = metadata["min"], metadata.get("max")
    if metadata["type"] is not None or metadata.get("parse") is not None:
        return metadata["type"] or str
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if kind is Path:
        return PATH
    if kind is float:
        return FiniteRange(min=low, max=high, min_open=metadata["min_open"])
    if kind is int and (low, high) != (None, None):
        return click.IntRange(low, high)
    return int if kind is int else str
