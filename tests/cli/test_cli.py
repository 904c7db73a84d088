"""The command line's frame: help is quick and complete, and every ending is one clear line and its exit code."""

from __future__ import annotations

import importlib
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from lowtri.cli import main as frame
from lowtri.errors import DataError, EngineError, LeakError, UndecidedError

HEAVY = ("numpy", "torch", "numba", "tokenizers", "transformers", "matplotlib", "safetensors")


def lowtri(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lowtri.cli.main", *arguments], capture_output=True, text=True, **options
    )


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a function in the place of `lowtri mask`."""

    def put(function: Any) -> None:
        module = ModuleType("lowtri.cli.learn")
        module.mask = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "lowtri.cli.learn", module)

    return put


def test_help_lists_every_verb_with_its_line_uncut(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for verb, one in frame.VERBS.items():
        assert f"  {verb} " in shown
        assert one.line in shown, f"the line of {verb} is cut: keep it under 66 characters"
    assert frame.main([]) == 0
    assert capsys.readouterr().out == shown


def test_every_help_opens_with_two_examples_and_loads_nothing_heavy() -> None:
    """One process prints all of them, so what one loads is seen after it; `--help` alone does not load masks either."""
    program = f"""
import sys
from lowtri.cli.main import VERBS, main
for words in ([], *([verb] for verb in VERBS)):
    main([*words, "--help"])
    light = [] if words else ["lowtri.masks"]
    print("heavy", [name for name in (*{HEAVY}, *light) if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    shown = ran.stdout.split("heavy []\n")
    assert "heavy" not in "".join(shown), ran.stdout[-500:]
    for name, text in zip(frame.VERBS, shown[1:], strict=False):
        lines = text.strip().splitlines()
        assert lines[2].startswith(f"  lowtri {name}") and lines[3].startswith(f"  lowtri {name}")
    assert len(shown) == len(frame.VERBS) + 2 and lowtri("--help").returncode == 0


def test_the_examples_of_every_verb_are_read_by_its_own_options() -> None:
    """Each example line is parsed, not run: an option that was renamed would be refused."""
    for name, one in frame.VERBS.items():
        function = getattr(importlib.import_module(f"lowtri.cli.{one.file}"), name)
        first = (function.__doc__ or "").strip().split("\n\n")[0]
        for line in first.splitlines():
            words = shlex.split(line, comments=True)
            words = words[: words.index("|")] if "|" in words else words
            assert words[:2] == ["lowtri", name]
            frame._load(name).make_context(name, words[2:])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import lowtri

    assert frame.main(["--version"]) == 0
    assert capsys.readouterr().out == f"lowtri {lowtri.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["maks"], "lowtri: No such command 'maks'. Did you mean 'mask'? (see: lowtri --help)\n"),
        (["--colour"], "lowtri: No such option: --colour (see: lowtri --help)\n"),
        (["generate", "out", "x", "--top-k", "many"], "lowtri: Invalid value for '--top-k'"),
        (["generate", "out", "x", "--tpo-k", "1"], "(see: lowtri generate --help)\n"),
        (["generate"], "lowtri: Missing argument 'MODEL'"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert frame.main(arguments) == 2
    out, err = capsys.readouterr()
    assert words in err and err.count("\n") == 1
    assert out == ""


def interrupted_import() -> ImportError:
    error = ImportError("numpy._core.multiarray failed to import")
    error.__cause__ = KeyboardInterrupt()
    return error


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (DataError("no such thing"), 2, "lowtri: no such thing\n"),
        (EngineError("cannot run"), 2, "lowtri: cannot run\n"),
        (LeakError("query 0 sees key 1"), 1, "lowtri: query 0 sees key 1\n"),
        (UndecidedError("too noisy"), 3, "lowtri: too noisy\n"),
        (typer.Exit(1), 1, ""),
        (MemoryError(), 2, "lowtri: there is not enough memory for these sizes. Fix: smaller ones"),
        (
            RuntimeError("[enforce fail] can't allocate memory: you tried"),
            2,
            "there is not enough memory for these sizes",
        ),
        (KeyboardInterrupt(), 130, "lowtri: interrupted\n"),
        (interrupted_import(), 130, "lowtri: interrupted\n"),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), 2, "lowtri: a.txt: No such file or directory\n"),
        (
            RuntimeError("first line\nsecond line"),
            70,
            "lowtri: stopped by an unforeseen RuntimeError: first line (LOWTRI_TRACEBACK=1 shows where)\n",
        ),
        (AssertionError(), 70, "unforeseen AssertionError: no message"),
    ],
)
def test_every_error_is_a_line_and_a_code(
    error: BaseException, code: int, words: str, verb: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise error

    verb(command)
    assert frame.main(["mask"]) == code
    assert words in capsys.readouterr().err


def test_the_traceback_is_shown_on_request(verb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> None:
        raise RuntimeError("here")

    verb(command)
    monkeypatch.setenv("LOWTRI_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="here"):
        frame.main(["mask"])


def test_a_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    program = """
import sys, types
module = types.ModuleType("lowtri.cli.learn")
def mask() -> None:
    for line in range(100_000):
        print(line)
module.mask = mask
sys.modules["lowtri.cli.learn"] = module
from lowtri.cli.main import main
sys.exit(main(["mask"]))
"""
    ran = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert ran.stdout is not None and ran.stderr is not None
    assert ran.stdout.readline() == "0\n"
    ran.stdout.close()
    errors = ran.stderr.read()
    ran.stderr.close()
    assert ran.wait() == 141
    assert errors == ""


full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")


@full
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("words", ["--help", "--version", "mask --help", "mask causal", "mask causal --json"])
def test_a_full_disk_is_reported_in_a_line(words: str, buffered: bool) -> None:
    how = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    with open("/dev/full", "w") as device:
        command = [sys.executable, "-m", "lowtri.cli.main", *words.split()]
        ran = subprocess.run(command, stdout=device, stderr=subprocess.PIPE, text=True, env=how)
    assert ran.returncode == 2
    assert ran.stderr == (
        "lowtri: the result, or a file, cannot be written: No space left on device. Fix: make room, or write it elsewhere\n"
    )


@full
@pytest.mark.parametrize("buffered", [True, False])
def test_a_full_stderr_leaves_the_exit_code(buffered: bool) -> None:
    how = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    with open("/dev/full", "w") as device:
        command = [sys.executable, "-m", "lowtri.cli.main", "mask", "no such mask"]
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=device, text=True, env=how)
    assert ran.returncode == 2 and ran.stdout == ""


@pytest.mark.skipif(os.name != "posix", reason="a shell that closes a stream")
def test_closed_streams() -> None:
    command = f"{shlex.quote(sys.executable)} -m lowtri.cli.main mask"
    ran = subprocess.run(["sh", "-c", f"{command} causal >&-"], capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr == "lowtri: stdout is closed, so the result has nowhere to go. Fix: > /dev/null\n"
    ran = subprocess.run(["sh", "-c", f"{command} nothing 2>&-"], capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stdout == "", "what is meant for stderr is no result"


@pytest.mark.parametrize(
    "words", ["audit no/such/model.py:model --out", "mask causal --svg", "mask causal --out", "explain hi --html"]
)
def test_a_path_that_cannot_be_written_is_reported_before_the_work(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = words.split()
    assert frame.main([*arguments, str(tmp_path / "missing" / "page.svg")]) == 2
    out, err = capsys.readouterr()
    assert f"there is no folder {tmp_path / 'missing'}. Fix: make it first (see: lowtri {arguments[0]} --help)" in err
    assert out == "" and arguments[-1] in err
    assert frame.main([*arguments, str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder. Fix: the name of a file in it" in capsys.readouterr().err


AT_STARTUP = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with SIGINT ignored

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""


EARLY = ("lowtri._version", "lowtri.__main__", "lowtri.errors", "lowtri.cli", "lowtri.extras", "typer")
LATE = {
    "lowtri.cli.main": "mask causal",
    "lowtri.cli.learn": "mask causal",
    "numpy.linalg": "mask causal",
    "torch": "audit model.py:make",
    "lowtri.cli.models": "generate out/book x",
}


@pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGINT of this kind")
@pytest.mark.parametrize(
    ("module", "how"),
    [*((module, how) for module in EARLY for how in ("script", "module")), *((module, "module") for module in LATE)],
)
def test_ctrl_c_while_a_module_loads(module: str, how: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_STARTUP, encoding="utf-8")
    (tmp_path / "lowtri").write_text(
        "import sys\nfrom lowtri.__main__ import main\nsys.exit(main())\n", encoding="utf-8"
    )
    work = tmp_path / "work"
    work.mkdir()
    (work / "model.py").write_text("import torch\n", encoding="utf-8")
    source = str(Path(frame.__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), source]), "INTERRUPTED": module}
    started = ["-m", "lowtri"] if how == "module" else [str(tmp_path / "lowtri")]
    command = [sys.executable, *started, *LATE.get(module, "--help").split()]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=work)
    assert (ran.stdout, ran.stderr) == ("", "lowtri: interrupted\n")
    assert ran.returncode == 130 or (module in EARLY and ran.returncode == -signal.SIGINT), "a shell shows both as 130"
    assert [path.name for path in work.iterdir() if path.name != "__pycache__"] == ["model.py"]


def test_another_program_keeps_its_own_excepthook() -> None:
    program = "import sys; import lowtri; assert sys.excepthook is sys.__excepthook__"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


COMPLETIONS = {
    "lowtri ge": "generate",
    "lowtri mask --be": "--beside",
    "lowtri explain --enc": "--encodings",
    "lowtri lesson --lang z": "zh",
    "lowtri --show": "--show-completion",
}


@pytest.mark.parametrize("words", COMPLETIONS)
def test_the_shell_completes_verbs_options_and_values(words: str) -> None:
    environment = os.environ | {
        "_LOWTRI_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    ran = subprocess.run([sys.executable, "-m", "lowtri"], capture_output=True, text=True, env=environment)
    assert (ran.stdout.split(), ran.stderr, ran.returncode) == ([COMPLETIONS[words]], "", 0)


def test_the_script_for_the_shell_is_printed() -> None:
    command = '"$0" -m lowtri.cli.main --show-completion; exit $?'  # the shell stays, so that it is recognized
    ran = subprocess.run(["bash", "-c", command, sys.executable], capture_output=True, text=True)
    assert "_LOWTRI_COMPLETE=complete_bash" in ran.stdout and ran.returncode == 0
