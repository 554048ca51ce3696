"""Guess how a model is fed and read, and write what was asked for."""

import json
from dataclasses import replace
from typing import Any

import click
import msgspec

from toolkit.cli.actions.outputs import write_text
from toolkit.cli.commands.model import Guess
from toolkit.errors import GuessError
from toolkit.guess.facts import ModelFacts
from toolkit.guess.proposal import Proposal, classes_of, names_of_classes, preprocess_of
from toolkit.guess.rules import guess as guess_model
from toolkit.guess.toml_text import model_text, proposal_text, relative_path


def guess(options: Guess) -> None:
    """Guess, write the files and print the answer. Raises TandemError."""
    size = options.input_size
    facts, proposal = guess_model(options.file, None if size is None else (size[1], size[0]))
    proposal = _chosen(proposal, options)
    if proposal.sureness != "ask":
        _write_files(facts, proposal, options)
    elif options.output or options.labels_out:
        kinds = "; ".join(
            f"{number}: {one.kind}, {one.why}"
            for number, one in enumerate(proposal.candidates, start=1)
        )
        raise GuessError(
            f"{options.file} does not show how it is read, so nothing was written ({kinds}): choose"
            " with `tandem model guess --choose NUMBER`."
        )
    if options.as_json:
        click.echo(json.dumps(_builtins(facts, proposal)))
    else:
        click.echo(proposal_text(facts, proposal), nl=False)


def _builtins(facts: ModelFacts, proposal: Proposal) -> dict[str, Any]:
    """Return the answer as JSON has it."""
    return {
        "rule": proposal.rule,
        "sureness": proposal.sureness,
        "labels": list(proposal.labels),
        "candidates": [
            {
                "kind": candidate.kind,
                "why": candidate.why,
                "notes": list(candidate.notes),
                "classes": classes_of(facts, candidate),
                "preprocess": msgspec.to_builtins(preprocess_of(facts, candidate)),
                "decode": msgspec.to_builtins(candidate.decode),
            }
            for candidate in proposal.candidates
        ],
    }


def _chosen(proposal: Proposal, options: Guess) -> Proposal:
    if options.choose is None:
        return proposal
    if options.choose > len(proposal.candidates):
        raise GuessError(
            f"{options.file} has {len(proposal.candidates)} readings, and --choose is"
            f" {options.choose}: `tandem model guess` without it lists them."
        )
    chosen = proposal.candidates[options.choose - 1]
    return replace(proposal, sureness="likely", candidates=(chosen,))


def _write_files(facts: ModelFacts, proposal: Proposal, options: Guess) -> None:
    for path in (options.output, options.labels_out):
        if path is not None and path.exists():
            raise GuessError(f"{path} exists: give a name that is free, or remove it.")
    if options.labels_out is not None:
        names = names_of_classes(facts, proposal, proposal.best)
        write_text(options.labels_out, "".join(f"{name}\n" for name in names))
    if options.output is not None:
        folder = options.output.absolute().parent
        labels = options.labels_out or folder / "labels.txt"
        text = model_text(facts, proposal, relative_path(labels, folder), folder)
        write_text(options.output, text)
