"""Guess how a model is fed and read, and write what was asked for."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from device.files import replacing
from toolkit.errors import GuessError
from toolkit.guess.facts import ModelFacts
from toolkit.guess.proposal import Proposal, classes_of, names_of_classes, preprocess_of
from toolkit.guess.rules import guess
from toolkit.guess.toml_text import model_text, proposal_text, relative_path


@dataclass(frozen=True, slots=True)
class GuessRequest:
    """The command line; `input_size`: (width, height)."""

    path: Path
    input_size: tuple[int, int] | None
    choose: int | None
    output: Path | None
    labels_out: Path | None


def guess_model(request: GuessRequest, *, as_json: bool) -> str:
    """Guess, write the files, and return what is printed. Raises TandemError."""
    size = request.input_size
    facts, proposal = guess(request.path, None if size is None else (size[1], size[0]))
    proposal = _chosen(proposal, request)
    if proposal.sureness != "ask":
        _write_files(facts, proposal, request)
    elif request.output or request.labels_out:
        kinds = "; ".join(
            f"{number}: {one.kind}, {one.why}"
            for number, one in enumerate(proposal.candidates, start=1)
        )
        raise GuessError(
            f"{request.path} does not show how it is read, so nothing was written ({kinds}): choose"
            " with `tandem model guess --choose NUMBER`."
        )
    if as_json:
        return json.dumps(guess_builtins(facts, proposal)) + "\n"
    return proposal_text(facts, proposal)


def guess_builtins(facts: ModelFacts, proposal: Proposal) -> dict[str, Any]:
    """Return the answer as JSON has it."""
    return {
        "rule": proposal.rule,
        "sureness": proposal.sureness,
        "labels": list(proposal.labels),
        "candidates": [
            {
                "kind": one.kind,
                "why": one.why,
                "notes": list(one.notes),
                "classes": classes_of(facts, one),
                "preprocess": msgspec.to_builtins(preprocess_of(facts, one)),
                "decode": msgspec.to_builtins(one.decode),
            }
            for one in proposal.candidates
        ],
    }


def _chosen(proposal: Proposal, request: GuessRequest) -> Proposal:
    if request.choose is None:
        return proposal
    if request.choose > len(proposal.candidates):
        raise GuessError(
            f"{request.path} has {len(proposal.candidates)} readings, and --choose is"
            f" {request.choose}: `tandem model guess` without it lists them."
        )
    chosen = proposal.candidates[request.choose - 1]
    return replace(proposal, sureness="likely", candidates=(chosen,))


def _write_files(facts: ModelFacts, proposal: Proposal, request: GuessRequest) -> None:
    for path in (request.output, request.labels_out):
        if path is not None and path.exists():
            raise GuessError(f"{path} exists: give a name that is free, or remove it.")
    if request.labels_out is not None:
        names = names_of_classes(facts, proposal, proposal.best)
        _write(request.labels_out, "".join(f"{name}\n" for name in names))
    if request.output is not None:
        folder = request.output.absolute().parent
        labels = request.labels_out or folder / "labels.txt"
        text = model_text(facts, proposal, relative_path(labels, folder), folder)
        _write(request.output, text)


def _write(path: Path, text: str) -> None:
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise GuessError(
            f"{path} cannot be written ({os.strerror(error.errno or 0)}): check the path."
        ) from error
