"""Training on several processes learns what one process learns, and survives kills and full disks."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_ranks import RECIPE, Training, error_of_rank_0, one_alone, training_run
from ranks import Ranks

from lowtri.errors import CallError
from lowtri.training.processes import processes_of_torchrun


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return training_run(None, Training(1, 1))


def close(found: dict[str, Any], expected: dict[str, Any], limit: float = 1e-5) -> None:
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=limit)
    np.testing.assert_allclose(
        [loss for _, loss in found["validations"]], [loss for _, loss in expected["validations"]], rtol=limit
    )
    for name, weight in expected["weights"].items():
        assert np.abs(found["weights"][name] - weight).max() < 20 * limit, name


@pytest.mark.parametrize(("dp", "sp"), [(2, 2), (1, 4), (4, 1)])
def test_several_processes_learn_what_one_learns(ranks: Ranks, alone: dict[str, Any], dp: int, sp: int) -> None:
    results = ranks.run(training_run, Training(dp, sp))
    close(results[0], alone)
    assert results[0]["watched"] == [1, 2, 3, 4] and not any(result["watched"] for result in results[1:])
    assert all(result["losses"] == results[0]["losses"] and not result["weights"] for result in results[1:])


def test_weights_of_a_model_on_the_meta_device_do_not_depend_on_the_number_of_processes(ranks: Ranks) -> None:
    expected = training_run(None, Training(1, 1, meta=True))
    results = ranks.run(training_run, Training(2, 2, meta=True))
    close(results[0], expected)
    # Before the first step, the same bits: a rate of almost nothing shows them.
    still = replace(RECIPE, steps=1, lr=1e-30)
    first = ranks.run(training_run, Training(4, 1, recipe=still, meta=True))[0]
    for name, weight in training_run(None, Training(1, 1, recipe=still, meta=True))["weights"].items():
        assert np.array_equal(first["weights"][name], weight), name


def test_accumulated_gradients(ranks: Ranks, alone: dict[str, Any]) -> None:
    """Parts with different numbers of targets weigh what they weigh together."""
    parts = replace(RECIPE, accumulate=2)
    close(training_run(None, Training(1, 1, recipe=parts)), alone)
    close(ranks.run(training_run, Training(2, 2, recipe=parts))[0], alone)


def test_bfloat16_keeps_float32_weights(ranks: Ranks, alone: dict[str, Any]) -> None:
    half = replace(RECIPE, dtype="bfloat16")
    for result in (
        training_run(None, Training(1, 1, recipe=half)),
        ranks.run(training_run, Training(2, 2, recipe=half))[0],
    ):
        assert all(weight.dtype == np.float32 for weight in result["weights"].values())
        close(result, alone, limit=2e-3)


def test_a_batch_that_cannot_be_shared(ranks: Ranks) -> None:
    results = ranks.run(training_run, Training(2, 2, recipe=replace(RECIPE, accumulate=3)))
    assert {result["error"] for result in results} == {
        "CallError: train: a batch of 4 rows cannot be shared by 2 groups in 3 parts.\nFix: --batch 6 or more."
    }


def test_a_full_disk_is_reported_on_every_rank_and_the_last_checkpoint_stays(ranks: Ranks, tmp_path: Path) -> None:
    first = ranks.run(training_run, Training(2, 2, tmp_path, recipe=replace(RECIPE, save_every=4)))[0]
    (tmp_path / "training-state" / "step-4" / "run.json").write_text(
        (tmp_path / "training-state" / "step-4" / "run.json").read_text().replace('"done": 4', '"done": 3')
    )
    (tmp_path / "training-state" / "step-4").rename(tmp_path / "training-state" / "step-3")
    results = ranks.run(training_run, Training(2, 2, tmp_path, recipe=replace(RECIPE, save_every=4), full_disk=1))
    for result in results:
        assert re.match("OSError: .*File too large.*training-state", result["error"]), result
    assert [path.name for path in (tmp_path / "training-state").glob("step-*")] == ["step-3"]
    assert first["watched"]


def test_an_error_of_rank_0_alone_is_raised_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    for result in ranks.run(training_run, Training(2, 2, tmp_path, broken_save=True)):
        assert re.match("DataError: .*could not be written: no text.*Fix", result["error"], re.S), result
    first, *others = ranks.run(error_of_rank_0)
    assert first.startswith("ZeroDivisionError") and len(others) == 3
    for message in others:
        assert re.match(r"RankError: rank 0 of 4 ended \(ZeroDivisionError: .*\nFix: .*--resume", message), message


def test_an_error_during_a_save_does_not_lose_it_and_dropout_is_the_same_after_resuming(
    ranks: Ranks, tmp_path: Path
) -> None:
    case = Training(4, 1, tmp_path, dropout=True, slow_save=0.5)
    results = ranks.run(training_run, replace(case, kill=(None, 3), raises=CallError))
    assert {result["error"] for result in results} == {"CallError: no memory for the rows"}
    assert results[0]["saved"] == ["step-2"], "rank 0 renames it"
    resumed, unbroken = ranks.run(training_run, case)[0], ranks.run(training_run, replace(case, folder=None))[0]
    assert resumed["watched"] == [3, 4] and resumed["losses"] == unbroken["losses"]
    assert all(np.array_equal(resumed["weights"][name], weight) for name, weight in unbroken["weights"].items())
    still = replace(case, folder=None, dropout=True, recipe=replace(RECIPE, seed=1))
    assert ranks.run(training_run, still)[0]["losses"] != unbroken["losses"]


def killed(folder: Path, rank: int | None) -> list[Any]:
    """What is left of a run of four processes of which one, or all, are killed in step 4; it saved after step 2."""
    group = Ranks(4, once=True)
    try:
        group.start(training_run, Training(2, 2, folder, kill=(rank, 4)))
        results = group.results()
    finally:
        group.stop()
    assert [path.name for path in (folder / "training-state").glob("step-*")] == ["step-2"]
    return results


def test_a_kill_in_the_middle_of_a_save_loses_the_steps_since_the_one_before(ranks: Ranks, tmp_path: Path) -> None:
    """And the resumed run is bit-equal to one that was never killed."""
    group = Ranks(4, once=True)
    try:
        group.start(training_run, Training(2, 2, tmp_path, kill_save=2))
        assert group.results(60) == [None] * 4
    finally:
        group.stop()
    state = tmp_path / "training-state"
    assert {path.name for path in state.iterdir()} == {"step-2", ".step-4.part"}
    resumed, unbroken = ranks.run(training_run, Training(2, 2, tmp_path))[0], ranks.run(training_run, Training(2, 2))[0]
    assert resumed["watched"] == [3, 4] and resumed["losses"] == unbroken["losses"]
    assert all(np.array_equal(resumed["weights"][name], weight) for name, weight in unbroken["weights"].items())
    assert {path.name for path in state.iterdir()} == {"step-4"}


@pytest.mark.parametrize(
    "victim", [1, pytest.param(0, marks=pytest.mark.sweep), pytest.param(3, marks=pytest.mark.sweep)]
)
def test_after_a_kill_the_others_end_and_one_of_them_says_so(tmp_path: Path, victim: int) -> None:
    group = Ranks(4, once=True)
    try:
        group.start(training_run, Training(2, 2, tmp_path, kill=(victim, 4), together=True))
        results = group.results(30)  # gloo's time-out is a minute
        for process in group.processes:
            process.join(20)
    finally:
        group.stop()
    assert results.pop(victim) is None
    messages = [result["error"] for result in results if result["error"] != "ended"]
    assert len(results) == 3 and len(messages) == 1, results
    assert re.match(
        r"RankError: step 4: .*a process of the group has ended.*\nFix: start it again with --resume", messages[0], re.S
    )
    assert [path.name for path in (tmp_path / "training-state").glob("step-*")] == ["step-2"]


@pytest.mark.sweep
def test_sweep_after_an_error_on_one_process_the_others_end_without_another_error(tmp_path: Path) -> None:
    group = Ranks(4, once=True)
    try:
        group.start(training_run, Training(2, 2, tmp_path, kill=(2, 4), raises=MemoryError, together=True))
        results = group.results(30)
    finally:
        group.stop()
    assert repr(results.pop(2)) == "MemoryError: no memory for the rows"
    assert [result["error"] for result in results] == ["ended"] * 3


@pytest.mark.sweep
def test_sweep_a_killed_run_resumes_on_any_number_of_ranks(ranks: Ranks, alone: dict[str, Any], tmp_path: Path) -> None:
    """Bit-equal on as many ranks, to rounding on fewer."""
    unbroken = ranks.run(training_run, Training(2, 2))[0]
    assert killed(tmp_path / "a", None) == [None] * 4
    for name in ("b", "c"):
        shutil.copytree(tmp_path / "a", tmp_path / name)
    same = ranks.run(training_run, Training(2, 2, tmp_path / "a"))[0]
    assert same["watched"] == [3, 4] and same["losses"] == unbroken["losses"]
    assert all(np.array_equal(same["weights"][name], weight) for name, weight in unbroken["weights"].items())
    close(training_run(None, Training(1, 1, tmp_path / "b")), alone)
    two = Ranks(2)
    try:
        close(two.run(training_run, Training(1, 2, tmp_path / "c"))[0], alone)
    finally:
        two.stop()


def test_a_run_moves_from_one_process_to_several_and_back(ranks: Ranks, alone: dict[str, Any], tmp_path: Path) -> None:
    """The step at which each begins shows that it resumed."""
    for part, (dp, sp) in enumerate(((1, 1), (2, 2), (1, 1))):
        case = Training(dp, sp, tmp_path, recipe=replace(RECIPE, save_every=1))
        if part < 2:
            case = replace(case, kill=(None, part + 2 if part == 0 else 2), raises=CallError)
        result = training_run(None, case) if dp == 1 else ranks.run(training_run, case)[0]
        if part < 2:
            assert result["saved"] == [f"step-{part + 1}"], result
    assert result["watched"] == [3, 4]
    close(result, alone)


def test_processes_that_train_alone_do_not_wait_for_each_other(
    ranks: Ranks, alone: dict[str, Any], tmp_path: Path
) -> None:
    """Each of those of torch.distributed has a run of its own, or none."""
    ranks.run(one_alone, tmp_path)
    resumed = training_run(None, Training(1, 1, tmp_path))
    assert not resumed["watched"] and resumed["losses"] == alone["losses"]


@pytest.mark.parametrize(
    ("dp", "sp", "words"),
    [(2, None, "--dp 2 x --sp 1: there is one process.*nproc-per-node 2"), (0, None, "--dp: got 0"), (1, 3, "node 3")],
)
def test_options_that_need_torchrun(dp: int | None, sp: int | None, words: str) -> None:
    with pytest.raises(CallError) as raised, processes_of_torchrun(dp, sp):
        pass
    assert re.search(words, str(raised.value), re.S)
