"""A reading of a model as TOML: [preprocess] and [decode] of pipeline.toml, or a model.toml."""

import json
from pathlib import Path
from typing import Any

import msgspec

from pipelines.config import ModelConfig, PreprocessConfig
from pipelines.decode_config import DecodeConfig
from toolkit.guess.facts import ModelFacts
from toolkit.guess.proposal import Candidate, Proposal, preprocess_of

ALWAYS = ("width", "height", "resize", "color")  # said even where they are the defaults
NUMBERS = 9  # significant digits: 1/255 as 0.00392156863


def settings_text(facts: ModelFacts, candidate: Candidate, prefix: str = "") -> str:
    """Return [preprocess] and [decode]; `prefix`: of their names, such as "models."."""
    return _settings_text(preprocess_of(facts, candidate), candidate.decode, prefix)


def guessed_text(
    facts: ModelFacts, proposal: Proposal, candidate: Candidate, prefix: str = ""
) -> str:
    """Return [preprocess] and [decode] of a candidate, with what is known and what is not as
    comments; `prefix`: as of `settings_text`."""
    comments = [*_head(facts, proposal), *_reasons(candidate)]
    return "\n".join([*comments, settings_text(facts, candidate, prefix)])


def model_settings_text(model: ModelConfig, prefix: str = "") -> str:
    """Return [preprocess] and [decode] of a model.toml; `prefix`: as of `settings_text`."""
    return _settings_text(model.preprocess, model.decode, prefix)


def _settings_text(preprocess: PreprocessConfig, decode: DecodeConfig, prefix: str) -> str:
    return (
        f"[{prefix}preprocess]\n{_table(preprocess, ALWAYS)}\n[{prefix}decode]\n"
        f"kind = {_value(decode.__struct_config__.tag)}\n{_table(decode, _names_of(decode))}"
    )


def string_text(text: str) -> str:
    """Return a text as a TOML string."""
    return _value(text)


def proposal_text(facts: ModelFacts, proposal: Proposal) -> str:
    """Return the whole answer as TOML, with what is known and what is not as comments."""
    lines = _head(facts, proposal)
    if proposal.sureness == "ask":
        several = len(proposal.candidates) > 1
        lines.append(
            "# Several decoders take such outputs: choose with `tandem model guess"
            " --choose NUMBER`."
            if several
            else "# Other models have such outputs, too: if this reading is right, choose it with"
            " `tandem model guess --choose 1`."
        )
        for number, candidate in enumerate(proposal.candidates, start=1):
            lines += ["#", _comment(f"{number}: {candidate.kind}: {candidate.why}.")]
            lines += [f"#    {line}".rstrip() for line in _lines(facts, candidate)]
        return "\n".join(lines) + "\n"
    return guessed_text(facts, proposal, proposal.best)


def model_text(facts: ModelFacts, proposal: Proposal, labels: str, folder: Path) -> str:
    """Return a model.toml for `folder`; `labels`: the path of the class names, relative to it."""
    head = [
        *_reasons(proposal.best),
        f"name = {_value(facts.path.stem)}",
        f"file = {_value(relative_path(facts.path, folder))}",
        f"labels = {_value(labels)}",
    ]
    return "\n".join([*head, "", *_lines(facts, proposal.best)]) + "\n"


def relative_path(path: Path, folder: Path) -> str:
    """Return a path as it is written in a file of `folder`."""
    target, start = path.resolve(), folder.resolve()
    return str(target.relative_to(start)) if target.is_relative_to(start) else str(target)


def _head(facts: ModelFacts, proposal: Proposal) -> list[str]:
    """Return comments on the model: how sure the guess is, and what it takes for granted."""
    lines = [_comment(f"{facts.path.name}: {proposal.sureness}, by the rule {proposal.rule!r}.")]
    if proposal.labels:
        count = len(proposal.labels)
        lines.append(f"# {count} class names in the metadata: `tandem model guess --labels-out`.")
    if facts.size_is_assumed:
        width, height = facts.size[::-1]
        lines.append(
            f"# The input's size is dynamic, {width} x {height} assumed: `tandem model guess"
            " --input-size`."
        )
    return lines


def _reasons(candidate: Candidate) -> list[str]:
    notes = [_comment(f"Note: {note}.") for note in candidate.notes]
    return [_comment(f"{candidate.why}."), *notes]


def _comment(text: str) -> str:
    """Return a comment of one line, whatever a file's names and metadata hold."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    return f"# {' '.join(printable.split())}"


def _lines(facts: ModelFacts, candidate: Candidate) -> list[str]:
    return settings_text(facts, candidate).rstrip("\n").split("\n")


def _names_of(decode: msgspec.Struct) -> tuple[str, ...]:
    """Return the keys that name outputs: they are said even where they are the defaults."""
    return tuple(
        field.name
        for field in msgspec.structs.fields(type(decode))
        if field.type is str and getattr(decode, field.name)
    )


def _table(value: PreprocessConfig | msgspec.Struct, always: tuple[str, ...]) -> str:
    fields = {field.name: field for field in msgspec.structs.fields(type(value))}
    order = [*(name for name in always if name in fields), *fields]
    lines = []
    for name in dict.fromkeys(order):
        actual, default = getattr(value, name), fields[name].default
        if name in always or not _same(actual, default):
            lines.append(f"{name} = {_value(actual)}\n")
    return "".join(lines)


def _same(actual: object, default: object) -> bool:
    """True for the default; one number for all channels equals a number for each."""
    if isinstance(actual, tuple) and isinstance(default, tuple) and len(default) == 1:
        return set(actual) == set(default)
    return actual == default


def _value(value: Any) -> str:  # noqa: ANN401  (what TOML can hold)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(float(f"{value:.{NUMBERS}g}"))
    if isinstance(value, str):  # JSON's escapes are TOML's, but for pairs of surrogates and DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)
