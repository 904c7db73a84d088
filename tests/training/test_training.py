"""The training loop: it learns, documents do not see each other, and a run killed anywhere ends as if it had not been."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lowtri.nn.checkpoint import load
from torch import nn

import loss_curve
import lowtri
from lowtri.cli.main import main
from lowtri.errors import CallError, DataError, MaskError
from lowtri.nn import Decoder, DecoderConfig
from lowtri.training import run as runs
from lowtri.training.corpus import Packed, Recipe
from lowtri.training.lock import only_training
from lowtri.training.run import Plan, read_plan, run
from lowtri.training.train import Step, _loss, newest, train

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = "".join(
    f"{n} green bottles hanging on the wall, and if one should fall, {n - 1} are left.\n" for n in range(99, 0, -1)
)


def small(seed: int = 0, **options: Any) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(DecoderConfig(**{"vocab_size": 20, "max_position_embeddings": 8, **SIZES, **options}))


def corpus(documents: int = 6, length: int = 40) -> Packed:
    draw = random.Random(0)
    return Packed.of([[draw.randrange(20) for _ in range(length)] for _ in range(documents)])


RECIPE = Recipe(steps=12, batch=3, context=8, lr=1e-2, validate_every=4, save_every=5)


# Learning


def test_a_text_that_repeats_is_learnt_and_the_watcher_sees_it() -> None:
    steps: list[Step] = []
    recipe = Recipe(steps=80, batch=4, context=8, lr=3e-2, validate_every=30)
    history = train(small(), Packed.of([[1, 2, 3, 4, 5] * 60]), recipe, on_step=steps.append)
    assert history.losses[0] > 2.5 and history.losses[-1] < 0.3
    assert [step.number for step in steps] == list(range(1, 81))
    assert [step.loss for step in steps] == history.losses
    assert [(step.number, step.validation) for step in steps if step.validation is not None] == history.validations
    assert [number for number, _ in history.validations] == [30, 60, 80]
    assert history.validations[-1][1] < 0.3
    assert [step.lr for step in steps] == [recipe.lr_at(number) for number in range(80)]
    assert all(step.tokens_per_second > 0 for step in steps)


def test_packed_documents_cost_what_they_cost_alone() -> None:
    """One row with three documents: its loss is the mean over the three, each computed by itself."""
    model = small(max_position_embeddings=9)
    texts = [[1, 5, 6], [2, 3, 4, 9], [7, 8]]
    packed = Packed.of([*texts, [0]])
    rows = packed.rows([0], context=9)
    together = _loss(model, rows, "sum").item()
    alone = 0.0
    for text in texts:
        logits = model(torch.tensor([text[:-1]]))
        alone += nn.functional.cross_entropy(logits[0], torch.tensor(text[1:]), reduction="sum").item()
    assert together == pytest.approx(alone, rel=1e-5)
    causal_alone = nn.functional.cross_entropy(
        model(torch.from_numpy(rows.inputs))[0], torch.from_numpy(rows.targets)[0], reduction="sum"
    ).item()
    assert abs(together - causal_alone) > 1e-4, "the mask of documents made no difference, so this test shows nothing"


def test_a_model_without_a_mask_is_trained_all_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
    history = train(
        model, Packed.of([[1, 2, 3, 4, 5] * 30, [6, 7] * 30]), Recipe(steps=60, batch=4, context=8, lr=5e-2)
    )
    assert history.losses[-1] < 0.3


def test_a_recurrent_model_learns_in_the_same_loop_and_starts_anew_with_each_document() -> None:
    from lowtri.nn import RecurrentLM

    torch.manual_seed(0)
    model = RecurrentLM(20, 16, cell="lstm")
    texts = [[1, 2, 3, 4, 5, 6, 7] * 9 for _ in range(5)]
    history = train(model, Packed.of(texts), Recipe(steps=80, batch=4, context=8, lr=5e-2))
    assert history.losses[0] > 2.5 and history.losses[-1] < 0.5
    rows = Packed.of([[5, 6, 7], [1, 2, 3, 0], [0]]).rows([0], context=7)
    first_of_second = model(torch.tensor([[1, 2]]))[0]
    packed = model(torch.from_numpy(rows.inputs), mask=lowtri.causal() & lowtri.documents(rows.documents))[0, 3:5]
    torch.testing.assert_close(packed, first_of_second)


def test_norms_are_not_decayed() -> None:
    from lowtri.training.train import _optimizer

    matrices, vectors = _optimizer(small(), Recipe(weight_decay=0.3)).param_groups
    assert matrices["weight_decay"] == 0.3 and vectors["weight_decay"] == 0.0
    assert {p.dim() for p in vectors["params"]} == {1} and {p.dim() for p in matrices["params"]} == {2}
    assert len(vectors["params"]) == 5


def test_too_little_text_is_rejected() -> None:
    with pytest.raises(
        DataError, match=r"the text has 5 tokens, and one row takes 9.\nFix: more text, or a smaller context"
    ):
        train(small(), Packed.of([[1, 2, 3, 4, 5]]), RECIPE)


def test_a_loss_that_is_nan_ends_the_run() -> None:
    model = small()
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(CallError, match=r"train: the loss is nan at step 1. Fix: an lr below 0.01"):
        train(model, corpus(), RECIPE)


# Resuming


class Killed(BaseException):
    """Ends a run from inside, as a kill would: nothing of ours catches it."""


def equal(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


@pytest.mark.parametrize("stop", range(1, 12))
def test_a_run_stopped_after_any_step_continues_bit_for_bit(stop: int, tmp_path: Path) -> None:
    def kill(step: Step) -> None:
        if step.number == stop:
            raise Killed

    straight, state = small(), tmp_path / "state"
    history = train(straight, corpus(), RECIPE)
    with pytest.raises(Killed):
        train(small(), corpus(), RECIPE, state=state, on_step=kill)
    resumed = small(seed=99)  # other weights: all must come from the state, where there is one
    if stop < RECIPE.save_every:
        assert not state.exists()
        resumed = small()
    seen: list[int] = []
    after = train(resumed, corpus(), RECIPE, state=state, on_step=lambda step: seen.append(step.number))
    assert seen[0] == stop // RECIPE.save_every * RECIPE.save_every + 1
    assert after.losses == history.losses and after.validations == history.validations
    assert equal(straight, resumed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recipe": Recipe(**{**RECIPE.__dict__, "lr": 0.5})}, r"belongs to a run with another recipe: lr 0.01 -> 0.5"),
        ({"corpus": corpus(5)}, "belongs to a run on other text: the files, or the vocabulary, changed since"),
        ({"model": small(hidden_size=32)}, "belongs to a model of other sizes: "),
    ],
)
def test_the_state_of_another_run_is_rejected(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    state = tmp_path / "state"
    these: dict[str, Any] = {"model": small(), "corpus": corpus(), "recipe": RECIPE}
    train(**these, state=state)
    with pytest.raises(DataError, match=words):
        train(**{**these, **change}, state=state)


# A whole run, to a folder


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "one.txt").write_text(TEXT, encoding="utf-8")
    (folder / "two.txt").write_text(TEXT[:500].upper(), encoding="utf-8")
    recipe = Recipe(steps=6, batch=2, context=32, save_every=2, validate_every=3)
    files = (str(folder / "one.txt"), str(folder / "two.txt"))
    return Plan(files, vocabulary=300, hidden=16, layers=1, heads=2, recipe=recipe)


@pytest.fixture(scope="module")
def finished(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run(plan, folder)
    return folder


FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "training-state"]
FILES += ["training.json"]


def test_the_folder_holds_what_it_should_and_loads(plan: Plan, finished: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert sorted(path.name for path in finished.iterdir()) == FILES
    assert read_plan(finished) == plan
    model, tokenizer = load(finished)
    assert tokenizer is not None
    ids = AutoTokenizer.from_pretrained(finished)("9 green bottles").input_ids
    assert ids == tokenizer.encode("9 green bottles").ids
    theirs = AutoModelForCausalLM.from_pretrained(finished).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(torch.tensor([ids])), theirs(torch.tensor([ids])).logits, atol=1e-5, rtol=1e-5)


def test_the_example_draws_the_losses_of_a_finished_run(finished: Path, tmp_path: Path, monkeypatch: Any) -> None:
    shutil.copy(finished / "training.json", tmp_path)
    monkeypatch.setattr(sys, "argv", ["loss_curve.py", str(tmp_path)])
    loss_curve.main()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "training.json").write_text('{"plan": {}}')
    with pytest.raises(SystemExit, match=r"training is not finished. Fix: lowtri train --out .* --resume"):
        loss_curve.main()


def test_a_finished_run_is_reported_and_not_run_again(plan: Plan, finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.iterdir()}
    notes: list[str] = []
    outcome = run(plan, finished, progress=notes.append)
    assert len(outcome.history.losses) == 6 and [number for number, _ in outcome.history.validations] == [3, 6]
    assert notes == [f"{finished} is finished: 6 steps"]
    assert before == {path: path.stat().st_mtime_ns for path in finished.iterdir()}


def test_another_plan_is_rejected_in_the_folder_of_a_run(plan: Plan, finished: Path, tmp_path: Path) -> None:
    other = Plan(**{**plan.__dict__, "heads": 1, "recipe": Recipe(**{**plan.recipe.__dict__, "lr": 0.5})})
    with pytest.raises(
        DataError, match=r"holds another run: heads 2 there, 1 here, lr 0.001 there, 0.5 here.\nFix: another folder"
    ):
        run(other, finished)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(DataError, match=r"holds a model that no run here made.\nFix: another folder"):
        run(plan, tmp_path)
    (tmp_path / "training.json").write_text('{"plan": {"steps": 1}}')
    with pytest.raises(DataError, match=r"training.json is no training plan: "):
        run(plan, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        *({"files": ("/nowhere/a.txt",)}, {"heads": 3}, {"vocabulary": 3}, {"context": 10**6}),
        {"mask": "causal & documents(lengths=[5, 9])"},
    ],
)
def test_a_plan_that_cannot_work_leaves_nothing_behind(change: dict[str, Any], plan: Plan, tmp_path: Path) -> None:
    if "context" in change:
        change = {"recipe": Recipe(context=change["context"])}
    folder = tmp_path / "out"
    with pytest.raises((DataError, CallError, MaskError)):
        run(Plan(**{**plan.__dict__, **change}), folder)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("change", "message"), [({"vocabulary": 3}, "vocabulary: got 3"), ({"cell": "foo"}, "cell is 'foo'")]
)
def test_sizes_are_checked_before_texts_are_read(
    change: dict[str, Any], message: str, plan: Plan, tmp_path: Path
) -> None:
    lines: list[str] = []
    with pytest.raises((DataError, CallError), match=message):
        run(Plan(**{**plan.__dict__, **change, "files": ("/nowhere/a.txt",)}), tmp_path / "out", progress=lines.append)
    assert lines == []


def test_a_run_killed_at_any_file_continues_bit_for_bit(
    plan: Plan, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each move of a file to its place, one moment after the other, until a run gets through."""
    move, moments = os.replace, 0
    while True:
        folder, left = tmp_path / str(moments), [moments]

        def dies(*paths: Any, left: list[int] = left) -> None:
            move(*paths)
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        monkeypatch.setattr(os, "replace", dies)
        try:
            run(plan, folder)
            break
        except Killed:
            moments += 1
        except DataError as error:  # from the thread that saves
            if "could not be written: Killed" not in str(error):
                raise
            moments += 1
        monkeypatch.setattr(os, "replace", move)
        (folder / ".model.safetensors.123.part").write_bytes(b"what a kill in the middle of a file leaves")
        run(plan, folder)
        assert sorted(path.name for path in folder.iterdir()) == FILES
        for name in FILES:
            if name not in ("training-state", "training.json"):  # the speed is in it
                assert (folder / name).read_bytes() == (finished / name).read_bytes(), (moments, name)
    # tokenizer and plan, three states and what is in them, four files of the checkpoint, the plan with its losses
    assert moments == 2 + 3 * 2 + 4 + 1


def test_a_run_whose_disk_is_full_at_any_file_keeps_what_was_saved(
    plan: Plan, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each move of a file to its place no file can be longer than 16 bytes, until there is nothing left to write."""
    resource = pytest.importorskip("resource")
    move, moments, most = os.replace, 0, resource.getrlimit(resource.RLIMIT_FSIZE)
    while True:
        folder, left = tmp_path / str(moments), [moments]

        def fills(*paths: Any, left: list[int] = left) -> None:
            move(*paths)
            left[0] -= 1
            if left[0] < 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (16, most[1]))

        monkeypatch.setattr(os, "replace", fills)
        try:
            run(plan, folder)
            break
        except DataError as error:
            message = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, most)
            monkeypatch.setattr(os, "replace", move)
        assert re.fullmatch(
            rf"{folder}/[\w.-]+ cannot be written: File too large. What was saved before is complete.\n"
            rf"Fix: make room, or the folder writable; then lowtri train --out {folder} --resume",
            message,
        ), message
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")], "no half file, and no lock"
        run(plan, folder)
        for name in FILES:
            if name not in ("training-state", "training.json"):
                assert (folder / name).read_bytes() == (finished / name).read_bytes(), (moments, name)
        moments += 1
    assert moments == 2 + 3 * 2 + 4  # all but the last, behind which nothing is written


def test_a_full_disk_in_the_loop_alone_names_the_file_and_keeps_the_old_one(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    state, most = tmp_path / "state", resource.getrlimit(resource.RLIMIT_FSIZE)

    def fills(step: Step) -> None:
        if step.number == 6:
            while not (state / "step-5").exists():
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most[1]))

    try:
        with pytest.raises(OSError, match="File too large") as caught:
            train(small(), corpus(), RECIPE, state=state, on_step=fills)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert caught.value.filename == str(state)
    seen: list[int] = []
    train(small(seed=99), corpus(), RECIPE, state=state, on_step=lambda step: seen.append(step.number))
    assert seen[0] == 6 and [path.name for path in state.iterdir()] == ["step-12"]


# Two at once


def test_a_second_training_in_a_folder_is_rejected_by_its_name(plan: Plan, tmp_path: Path) -> None:
    """Both in this process here, and in the next test in two: the lock belongs to the open file."""
    folder, words = tmp_path / "out", []

    def second(step: Step) -> None:
        if step.number == 3:
            half = folder / ".tokenizer.json.123.part"
            half.write_bytes(b"what the first may be writing now")
            with pytest.raises(DataError) as caught:
                run(plan, folder)
            words.append(str(caught.value))
            assert half.exists(), "the second has touched nothing"

    run(plan, folder, on_step=second)
    assert words == [
        f"{folder} is in use by another training (process {os.getpid()}).\n"
        "Fix: another folder, or wait until it has ended"
    ]
    (folder / ".tokenizer.json.123.part").unlink()
    assert sorted(path.name for path in folder.iterdir()) == FILES, "and the lock is gone"


def test_of_two_trainings_that_begin_together_one_is_rejected(plan: Plan, tmp_path: Path) -> None:
    """The second begins while the first still reads its text."""
    folder = tmp_path / "out"

    def other(line: str) -> None:
        if line.startswith("learning"):
            with pytest.raises(
                DataError, match=r"out is in use by another training \(process \d+\).\nFix: another folder"
            ):
                run(plan, folder)

    run(plan, folder, progress=other)
    assert sorted(path.name for path in folder.iterdir()) == FILES


def test_a_file_in_place_of_a_folder_is_refused_and_stays(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(DataError, match=r"out is a file, but a run has a folder.\nFix: another path"):
        run(plan, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_a_lock_left_by_a_kill_locks_nobody_out(plan: Plan, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / ".training.lock").write_text("1")
    run(plan, folder)
    assert sorted(path.name for path in folder.iterdir()) == FILES


def test_a_process_that_was_killed_has_no_lock_and_one_that_runs_has(tmp_path: Path) -> None:
    code = "import sys, time, pathlib; from lowtri.training.lock import only_training\n"
    code += "with only_training(pathlib.Path(sys.argv[1])): print('locked', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    with (
        pytest.raises(DataError, match=rf"in use by another training \(process {process.pid}\)"),
        only_training(tmp_path),
    ):
        pass
    process.kill()
    process.wait()
    process.stdout.close()
    with only_training(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_ctrl_c_prints_how_to_continue(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed(step: Step) -> None:
        if step.number == 3:
            raise KeyboardInterrupt

    folder = tmp_path / "a b"
    words = ["train", *plan.files, "--vocabulary", "300", "--hidden", "16", "--layers", "1", "--heads", "2"]
    words += ["--context", "32", "--batch", "2", "--steps", "6", "--save-every", "2", "--out", str(folder)]
    real = runs.train
    with monkeypatch.context() as patch:
        patch.setattr(runs, "train", lambda *args, **options: real(*args, **{**options, "on_step": pressed}))
        assert main(words) == 130
    said = capsys.readouterr().err.splitlines()
    assert said[-2:] == [
        f"what was saved is in {folder}; go on with: lowtri train --out '{folder}' --resume",
        "lowtri: interrupted",
    ]
    assert main(["train", "--out", str(folder), "--resume"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == FILES
    capsys.readouterr()

    def pressed_early(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "read_files", pressed_early)
    words[-1] = str(tmp_path / "early")
    assert main(words) == 130
    assert "--resume" not in capsys.readouterr().err, "nothing was begun"


def _killed_and_resumed(plan: Plan, finished: Path, folder: Path, kills: int, seed: int) -> None:
    """The command line in processes of its own, killed without warning at random moments, then let through."""
    words = [*plan.files, "--vocabulary", "300", "--hidden", "16", "--layers", "1", "--heads", "2", "--context", "32"]
    words += ["--batch", "2", "--steps", "400", "--save-every", "1", "--out", str(folder), "--resume"]
    draw = random.Random(seed)
    environment = {**os.environ, "LOWTRI_CACHE": str(folder.parent / "cache")}
    for _ in range(kills):
        before = newest(folder / "training-state")
        process = subprocess.Popen(
            [sys.executable, "-m", "lowtri", "train", *words], stderr=subprocess.DEVNULL, env=environment
        )
        # Starting takes seconds and writes nothing: the random moment lies among the steps, where something can be lost.
        while process.poll() is None and newest(folder / "training-state") == before:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.3))
        process.kill()
        process.wait()
        assert process.returncode == -signal.SIGKILL, "it ended before it was killed: let it take more steps"
        assert not (folder / "model.safetensors").exists()
    words = ["train", "--out", str(folder), "--resume"]
    subprocess.run([sys.executable, "-m", "lowtri", *words], check=True, capture_output=True, env=environment)
    assert (folder / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == FILES


@pytest.fixture(scope="module")
def long(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    recipe = Recipe(steps=400, batch=2, context=32, save_every=1)
    run(Plan(**{**plan.__dict__, "recipe": recipe}), folder)
    return folder


@pytest.mark.sweep
def test_killed_processes_are_resumed_bit_for_bit(plan: Plan, long: Path, tmp_path: Path) -> None:
    _killed_and_resumed(plan, long, tmp_path / "out", kills=1, seed=0)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1, 4))
def test_many_killed_processes_are_resumed_bit_for_bit(plan: Plan, long: Path, tmp_path: Path, seed: int) -> None:
    _killed_and_resumed(plan, long, tmp_path / "out", kills=6, seed=seed)
