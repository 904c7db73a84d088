"""A training run, from text files to a checkpoint folder: plan, corpus, tokenizer, model, loop, files.

    training.json            the training plan, written as soon as it is known to work; at the end also the losses
    tokenizer.json           written at the same time as the plan
    training-state/          weights and moments of the newest saved step, from which the run is resumed, or goes on for more steps
    config.json, model.safetensors, tokenizer_config.json        written at the end

So a plan that cannot work leaves nothing behind, a run can be resumed from any moment, and while a finished run goes on, its
model stays in the folder until the next one replaces it. The folder is locked from the beginning of a run to its end.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lowtri.errors import DataError
from lowtri.files import write_atomically, write_text
from lowtri.masks import as_mask
from lowtri.masks.label_masks import check_row_lengths
from lowtri.nn.checkpoint import save
from lowtri.nn.config import DecoderConfig, RecurrentConfig
from lowtri.nn.decoder import Decoder
from lowtri.nn.files import load_tokenizer
from lowtri.nn.recurrent import RecurrentLM
from lowtri.training.corpus import Packed, Recipe, check_vocabulary, encode_document, learn, read_files
from lowtri.training.lock import only_training
from lowtri.training.processes import Processes
from lowtri.training.train import History, Step, first_loss, full_weights, newest, train

PLAN, STATE, WEIGHTS = "training.json", "training-state", "model.safetensors"


@dataclass(frozen=True)
class Plan:
    """Everything that decides what is learnt."""

    files: tuple[str, ...]  # absolute paths
    mask: str = "causal"
    vocabulary: int = 4096
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None  # as many as heads
    cell: str | None = None  # a recurrent model of these cells instead of a decoder
    recipe: Recipe = field(default_factory=Recipe)

    def config(self, vocabulary: int) -> DecoderConfig | RecurrentConfig:
        """The sizes of the model for a tokenizer that has so many tokens.

        Raises:
            CallError, DataError: if a size or the cell does not fit.
        """
        check_vocabulary(vocabulary)
        mask = repr(as_mask(self.mask))
        if self.cell is not None:
            return RecurrentConfig(vocabulary, self.hidden, self.layers, self.cell, mask=mask)
        return DecoderConfig(
            vocab_size=vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads if self.kv_heads is None else self.kv_heads,
            max_position_embeddings=self.recipe.context,
            mask=mask,
        )

    def model(self, vocabulary: int) -> Decoder | RecurrentLM:
        """The model for such a tokenizer, its weights fresh."""
        config = self.config(vocabulary)
        return RecurrentLM.from_config(config) if isinstance(config, RecurrentConfig) else Decoder(config)


class Outcome(NamedTuple):
    """A finished run."""

    folder: Path
    parameters: int
    tokens: int  # in the whole corpus
    history: History


def read_plan(folder: Path) -> Plan | None:
    """The plan of the run in a folder; None if no run began there."""
    content = _read(folder / PLAN)
    if content is None:
        return None
    try:
        plan: dict[str, Any] = content["plan"]
        return Plan(**{**plan, "files": tuple(plan["files"]), "recipe": Recipe(**plan["recipe"])})
    except (KeyError, TypeError) as error:
        raise DataError(f"{folder / PLAN} is no training plan: {error}") from None


def run(
    plan: Plan,
    folder: Path,
    *,
    device: str = "cpu",
    progress: Callable[[str], object] = lambda _: None,
    on_step: Callable[[Step], object] | None = None,
    processes: Processes | None = None,
) -> Outcome:
    """Carry out a plan; a run that began in the folder is resumed, also with more steps; a finished one is only reported.

    Args:
        progress: receives a line as each stage begins.
        on_step: is called after each step, on rank 0.
        processes: those that train together, each with the same arguments; rank 0 alone reads texts and writes files.

    Raises:
        DataError: if a file cannot be used or written, the text is too short, or the folder holds another run or is in use
            by one.
    """
    processes = processes or Processes()
    with ExitStack() as stack:
        try:
            processes.on_main(lambda: stack.enter_context(only_training(folder)))
            return _run(plan, folder, device, progress, on_step, processes)
        except OSError as error:
            if error.filename is None or not Path(error.filename).is_relative_to(folder):
                raise  # raised by on_step, or for a file that is only read
            raise DataError(
                f"{error.filename} cannot be written: {error.strerror}. What was saved before is complete.\n"
                f"Fix: make room, or the folder writable; then lowtri train --out {shlex.quote(str(folder))} --resume"
            ) from error


def _run(
    plan: Plan,
    folder: Path,
    device: str,
    progress: Callable[[str], object],
    on_step: Callable[[Step], object] | None,
    processes: Processes,
) -> Outcome:
    begun = processes.on_main(lambda: _begin(plan, folder, progress))
    if isinstance(begun, Outcome):
        return begun
    from tokenizers import Tokenizer

    tokenizer, corpus = Tokenizer.from_str(begun[0]), begun[1]
    vocabulary = tokenizer.get_vocab_size()
    torch.manual_seed(plan.recipe.seed)
    without_weights = plan.cell is None and processes.world > 1  # each process draws its shards only
    with torch.device("meta") if without_weights else nullcontext():
        model = plan.model(vocabulary)
    if not without_weights:
        model = model.to(device)
        if isinstance(model, Decoder):
            torch.manual_seed(plan.recipe.seed)
            model.init_weights()  # the numbers that several processes draw
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if processes.is_main:
        progress(f"{len(corpus):,} tokens; {parameters:,} parameters, mask {model.config.mask}")

    def claim() -> None:  # once the plan is known to work
        write_atomically(folder / "tokenizer.json", lambda path: tokenizer.save(str(path)))
        _write(folder / PLAN, {"plan": asdict(plan)})

    processes.on_main(claim)
    if not (folder / STATE).exists() and processes.world == 1:
        progress(
            f"loss {first_loss(model, corpus, plan.recipe):.4f} before the first step; "
            f"{math.log(vocabulary):.4f} is a guess among all tokens"
        )
    history = train(model, corpus, plan.recipe, state=folder / STATE, on_step=on_step, processes=processes)
    if processes.world > 1:
        weights = full_weights(model)
        if processes.is_main:
            model = plan.model(vocabulary)
            model.load_state_dict(weights)
    result = {"parameters": parameters, "tokens": len(corpus), "history": asdict(history)}

    def finish() -> None:
        save(model.cpu(), folder, tokenizer)
        _write(folder / PLAN, {"plan": asdict(plan), **result})

    processes.on_main(finish)
    return Outcome(folder, parameters, len(corpus), history)


def _begin(plan: Plan, folder: Path, progress: Callable[[str], object]) -> Outcome | tuple[str, Packed]:
    """Check the folder, read the texts, and learn the tokenizer (returned as JSON); or the outcome of a finished run."""
    begun = read_plan(folder)
    if begun is not None and (differences := _differences(begun, plan)):
        raise DataError(f"{folder} holds another run: {', '.join(differences)}.\nFix: another folder")
    if begun is None and (folder / WEIGHTS).exists():
        raise DataError(f"{folder} holds a model that no run here made.\nFix: another folder")
    for temporary in folder.glob(".*.[0-9]*.part"):  # left by a kill
        temporary.unlink()
    content = _read(folder / PLAN) or {}
    if "history" in content and begun == plan:
        progress(f"{folder} is finished: {plan.recipe.steps} steps")
        return Outcome(folder, content["parameters"], content["tokens"], History.of(content["history"]))
    if "history" in content:
        if newest(folder / STATE) is None:
            raise DataError(f"{folder} is finished, and its {STATE} is gone: it cannot go on.\nFix: another folder")
        done = content["plan"]["recipe"]["steps"]
        progress(f"{folder} goes on: {done} steps are done, {plan.recipe.steps} will be")
    plan.config(plan.vocabulary)  # before the texts are read
    check_row_lengths("train", as_mask(plan.mask), plan.recipe.context)
    documents = read_files(plan.files)
    tokenizer = load_tokenizer(folder) if begun is not None else None
    if tokenizer is None:
        progress(f"learning {plan.vocabulary} tokens from {len(documents)} document{'s' * (len(documents) != 1)}")
        tokenizer = learn((document.text for document in documents), plan.vocabulary)
    corpus = Packed.of(encode_document(tokenizer, document.text) for document in documents)
    corpus.require(plan.recipe.context)
    return tokenizer.to_str(), corpus


def _differences(begun: Plan, plan: Plan) -> list[str]:
    """What differs from the plan that began, except for more steps."""
    before, now = ({**asdict(each), **asdict(each.recipe)} for each in (begun, plan))
    now["steps"] = before["steps"] if now["steps"] > before["steps"] else now["steps"]
    return [f"{key} {before[key]} there, {now[key]} here" for key in now if key != "recipe" and before[key] != now[key]]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return content


def _write(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")
