"""examples/train on one process: documents do not see each other, models learn, and a killed run ends as if it had not been."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from train_on_ranks import MODELS, decoder

import lowtri
import processes as files
from corpus import Packed, Recipe
from lowtri.errors import DataError
from lowtri.nn import Decoder, RecurrentLM
from train import Run, main

PROGRAM = Path(__file__).parents[2] / "examples" / "train" / "train.py"
KINDS = list(MODELS)


# Learning


def logits_alone(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits (N, V) of one document by itself, under the model's own mask."""
    if isinstance(model, Decoder):
        return model(torch.tensor([ids]))[0]
    from lowtri.integrations.transformers import use

    return use(model)(torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_packed_loss_is_the_documents_own(kind: str, bf16: bool) -> None:
    """A row with three documents: its loss is the sum over the three, each computed by itself."""
    model = MODELS[kind]()
    with torch.no_grad():
        for weight in model.parameters():  # as drawn, it predicts nothing, and every token costs about the same
            weight.mul_(8 if weight.dim() == 2 else 1)
    draw = random.Random(0)
    texts = [[draw.randrange(60) for _ in range(length)] for length in (40, 17, 30)]
    packed = Packed.of([*texts, [0]])
    run = Run(model, packed, Recipe(context=87, bf16=bf16), "causal")
    rows = packed.rows([0], context=87)
    together = run.loss(rows).item()
    alone = 0.0
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        for text in texts:
            logits = logits_alone(model, text[:-1])
            assert logits.dtype == (torch.bfloat16 if bf16 else torch.float32)
            alone += nn.functional.cross_entropy(logits.float(), torch.tensor(text[1:]), reduction="sum").item()
        seen = logits_alone(model, rows.inputs[0].tolist()).float()
    assert together == pytest.approx(alone, rel=5e-4 if bf16 else 1e-6)
    as_one_text = nn.functional.cross_entropy(seen, torch.from_numpy(rows.targets[0]), reduction="sum").item()
    assert abs(as_one_text - alone) > 2e-3 * alone, (
        "the mask of documents made no difference, so this test shows nothing"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_learnt_under_bf16(kind: str) -> None:
    """Each document repeats a word of its own, so that 9 tokens in 10 can be predicted."""
    draw = random.Random(0)
    words = [[draw.randrange(60) for _ in range(5)] for _ in range(4)]
    packed = Packed.of([draw.choice(words) * draw.randrange(3, 12) for _ in range(60)])
    recipe = Recipe(steps=50, batch=4, context=64, lr=2e-2, held_out=0.1, bf16=True)
    model = MODELS[kind]()
    run = Run(model, packed, recipe, "causal")
    losses = list(run.train())
    assert losses[0] > 3.5 and losses[-1] < 0.5 and run.validate() < 0.5
    assert all(weight.dtype == torch.float32 for weight in model.parameters())


def test_a_recurrent_model_learns_in_the_same_loop() -> None:
    torch.manual_seed(0)
    packed = Packed.of([[1, 2, 3, 4, 5, 6, 7] * 9 for _ in range(5)])
    losses = list(
        Run(RecurrentLM(20, 16, cell="lstm"), packed, Recipe(steps=80, batch=4, context=8, lr=5e-2), "causal").train()
    )
    assert losses[0] > 2.5 and losses[-1] < 0.5


def test_norms_are_not_decayed() -> None:
    run = Run(decoder(), Packed.of([[1] * 99]), Recipe(context=8, weight_decay=0.3), "causal")
    matrices, others = run.optimizer.param_groups
    assert matrices["weight_decay"] == 0.3 and others["weight_decay"] == 0.0
    assert {weight.dim() for weight in matrices["params"]} == {2}
    assert [weight.dim() for weight in others["params"]] == [1] * 5


def test_a_loss_that_is_nan_ends_the_run() -> None:
    model = decoder()
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    run = Run(model, Packed.of([[1, 2, 3] * 30]), Recipe(context=8, lr=0.01), "causal")
    with pytest.raises(DataError, match=r"the loss is nan at step 1.\nFix: an lr below 0.01"):
        list(run.train())


# Checkpoints


@pytest.fixture
def group() -> Iterator[None]:
    """torch.distributed with this process alone."""
    with files.processes(1):
        yield


def small() -> Run:
    """A run of 8 steps."""
    draw = random.Random(0)
    packed = Packed.of([[draw.randrange(60) for _ in range(40)] for _ in range(6)])
    model = decoder(hidden_size=16, num_hidden_layers=1)
    return Run(model, packed, Recipe(steps=8, batch=3, context=8, lr=1e-2), "causal")


def saved(folder: Path, steps: int = 1) -> Run:
    """A run with a checkpoint after so many steps."""
    run = small()
    for _ in zip(range(steps), run.train(), strict=False):
        pass
    files.save(folder, run.done, run.model, run.optimizer)
    return run


def resumed(folder: Path) -> Run:
    run = small()
    with torch.no_grad():
        for weight in run.model.parameters():
            weight.add_(1)  # all must come from the checkpoint
    run.done = files.resume(folder, run.model, run.optimizer)
    return run


@pytest.mark.sweep
@pytest.mark.parametrize("stop", [1, 2, 7, 8])
@pytest.mark.usefixtures("group")
def test_a_run_stopped_after_any_step_continues_bit_for_bit(stop: int, tmp_path: Path) -> None:
    whole, before = small(), small()
    losses = list(whole.train())
    begun = [loss for _, loss in zip(range(stop), before.train(), strict=False)]
    files.save(tmp_path, before.done, before.model, before.optimizer)
    after = resumed(tmp_path)
    assert after.done == stop
    assert begun + list(after.train()) == losses
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(after.model.state_dict()[name], weight), name


@pytest.mark.parametrize("moment", ["before its name", "after its name"])
@pytest.mark.usefixtures("group")
def test_a_kill_around_the_renaming(tmp_path: Path, moment: str) -> None:
    """Before a checkpoint has its name, the one before it is the newest; then it is itself, also while the old one is removed."""
    run = saved(tmp_path)
    next(run.train())
    name = "os.replace" if moment == "before its name" else "shutil.rmtree"
    with mock.patch(name, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        files.save(tmp_path, run.done, run.model, run.optimizer)
    after = resumed(tmp_path)
    assert after.done == (1 if moment == "before its name" else 2)
    next(after.train())
    files.save(tmp_path, after.done, after.model, after.optimizer)
    assert os.listdir(tmp_path) == [f"step-{after.done}"]


@pytest.mark.usefixtures("group")
def test_without_a_checkpoint_nothing_is_loaded(tmp_path: Path) -> None:
    run = small()
    before = {name: weight.clone() for name, weight in run.model.state_dict().items()}
    assert files.resume(tmp_path / "none", run.model, run.optimizer) == 0
    assert all(torch.equal(weight, before[name]) for name, weight in run.model.state_dict().items())


# The program


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two texts, and the options of a small run."""
    folder = tmp_path_factory.mktemp("texts")
    text = "".join(f"{n} green bottles hanging on the wall, and {n - 1} are left.\n" for n in range(99, 0, -1))
    (folder / "one.txt").write_text(text)
    (folder / "two.txt").write_text(text[:900].upper())
    sizes = "--vocabulary 300 --hidden 16 --layers 1 --heads 2 --context 64 --batch 2 --steps 6 --every 2"
    return [str(folder / "one.txt"), str(folder / "two.txt"), *sizes.split()]


@pytest.fixture(scope="module")
def finished(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "out"
    main([*words, "--out", str(folder)])
    return folder


def test_a_run_prints_its_losses_and_a_sample_and_its_folder_loads(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*words, "--out", str(tmp_path / "new" / "out"), "--prompt", "9 green"])
    printed, errors = capsys.readouterr()
    assert errors == ""
    lines = printed.splitlines()
    for line, step in zip(lines, (2, 4, 6), strict=False):
        assert re.fullmatch(rf"step {step}: loss \d\.\d{{4}}, held out \d\.\d{{4}} nats a token", line)
    assert lines[3].startswith("9 green")
    folder = tmp_path / "new" / "out"
    files_there = {"config.json", "model.safetensors", "tokenizer.json", "run.json", "state"}
    assert {path.name for path in folder.iterdir()} == files_there
    from tokenizers import Tokenizer

    model, tokenizer = Decoder.load(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    again = "".join(lowtri.generate(model, "9 green", 40, tokenizer=tokenizer))
    assert printed.split("nats a token\n")[-1] == f"9 green{again}\n"
    assert model.mask == lowtri.causal() and model.config.max_position_embeddings == 64


def test_the_sample_of_a_short_context_ends_with_it(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*words, "--context", "16", "--out", str(tmp_path / "out"), "--prompt", "9 green"])
    printed, errors = capsys.readouterr()
    assert errors == "" and printed.splitlines()[3].startswith("9 green")


def test_a_model_of_transformers_by_its_type_or_its_config(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    common = [*words, "--bf16", "--mask", "causal & window(16)", "--out"]
    main([*common, str(tmp_path / "a"), "--config", "llama"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert (model.config.model_type, model.config.num_hidden_layers, model.config.hidden_size) == ("llama", 1, 16)
    assert model.dtype == torch.float32
    ids = tokenizer("green bottles")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "green bottles"
    assert ids[0] == model.config.bos_token_id and tokenizer.eos_token_id == model.config.eos_token_id
    capsys.readouterr()
    main([*common, str(tmp_path / "b"), "--config", str(tmp_path / "a" / "config.json"), "--seed", "1"])
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert other.config.hidden_size == 16 and not torch.equal(other.lm_head.weight, model.lm_head.weight)
    assert "step 6: loss" in capsys.readouterr().out


def test_the_same_command_again_goes_on_or_reports(
    words: list[str], finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(finished, folder)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    main([*words, "--out", str(folder)])
    assert (folder / "model.safetensors").read_bytes() == weights
    assert "step" not in capsys.readouterr().out, "no step was left"


def test_an_interrupted_run_ends_with_the_same_weights(words: list[str], finished: Path, tmp_path: Path) -> None:
    folder, steps = tmp_path / "out", Run.train

    def interrupted(run: Run) -> Iterator[float]:
        for loss in steps(run):
            if run.done == 3:
                raise KeyboardInterrupt
            yield loss

    with mock.patch.object(Run, "train", interrupted), pytest.raises(KeyboardInterrupt):
        main([*words, "--out", str(folder)])
    assert os.listdir(folder / "state") == ["step-2"]
    main([*words, "--out", str(folder)])
    assert (folder / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--lr", "0.5"], r"holds another run: lr 0.001 there, 0.5 here.\nFix: another folder, or its options"),
        (["--config", "llama"], "holds another run: config None there, llama here"),
        (
            ["--sp", "2"],
            r"--sp: got 2, which does not divide the number of processes, 1.\nFix: torchrun --nproc-per-node 2",
        ),
        (["--context", "4096"], "tokens, and one row takes 4097"),
        (["--vocabulary", "9"], "vocabulary: got 9; at least 258 are needed"),
    ],
)
def test_a_run_that_cannot_be_is_refused(words: list[str], finished: Path, change: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message) as raised:
        main([*words, "--out", str(finished), *change])
    assert str(raised.value).startswith("train: ")


def test_other_text_or_another_folder_is_refused(words: list[str], finished: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"holds another run: text [0-9a-f]{16} there, [0-9a-f]{16} here"):
        main([words[1], words[0], *words[2:], "--out", str(finished)])
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(SystemExit, match=r"is not empty, and holds no run.\nFix: another folder"):
        main([*words, "--out", str(tmp_path)])


@pytest.mark.parametrize("options", [[], ["--config", "llama"]], ids=KINDS)
def test_a_mask_that_shows_what_is_predicted_is_said_in_one_line(
    words: list[str], options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mask = "band(3, 1)"
    main([*words, *options, "--mask", mask, "--out", str(tmp_path / "out")])
    printed, errors = capsys.readouterr()
    assert errors.splitlines()[0] == f"the mask {mask} shows what is predicted: this loss means nothing"
    assert len(printed.splitlines()) == 3, "no sample"


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(3))
def test_sweep_killed_processes_are_resumed_bit_for_bit(words: list[str], tmp_path: Path, seed: int) -> None:
    """Killed without warning at random moments, then let through."""
    common = [*words, "--steps", "200", "--every", "1", "--out"]
    main([*common, str(tmp_path / "whole")])
    folder, draw = tmp_path / "out", random.Random(seed)
    command = [sys.executable, PROGRAM, *common, str(folder)]
    for _ in range(3):
        before = set(folder.glob("state/step-*"))
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # Starting takes seconds and writes nothing: the random moment lies among the steps, where something can be lost.
        while process.poll() is None and set(folder.glob("state/step-*")) == before:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.3))
        process.kill()
        process.wait()
        assert process.returncode == -signal.SIGKILL, "it ended before it was killed: let it take more steps"
        assert not (folder / "model.safetensors").exists()
    subprocess.run(command, check=True, capture_output=True)
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert json.loads((folder / "run.json").read_text())["steps"] == 200
