"""lowtri with NumPy alone: what runs, and what the rest says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

from lowtri import ExtraError, explain, extras

ROOT = Path(__file__).parents[1]
ABSENT = """
import sys
for name in %r:
    sys.modules[name] = None  # as if it were not installed
"""
NUMPY_ALONE = """
import numpy as np, lowtri

q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 64, 16))
output = lowtri.attention(q, k, v, "causal & window(8)")
assert np.allclose(output, lowtri.attention(q, k, v, "causal & window(8)", engine="reference"))
lowtri.attention(*(x.astype(np.float16) for x in (q, k, v)), "causal")
x = np.zeros((8, 512, 4))
assert lowtri.attention(x, x, x, "causal", return_weights=True)[1].shape == (8, 512, 512)
dropped = []
for engine in ("auto", "reference"):
    np.random.seed(1)
    dropped.append(lowtri.attention(q, k, v, "causal", dropout=0.1, engine=engine))
assert np.allclose(*dropped) and not np.allclose(dropped[0], lowtri.attention(q, k, v, "causal"))
assert lowtri.attention(q, k, v, "causal", return_received=True)[1].shape == (2, 4, 64)
try:
    lowtri.parallel.ContextParallel
    raise SystemExit("ContextParallel needs torch")
except lowtri.ExtraError as error:
    assert "lowtri.parallel.ContextParallel needs torch" in str(error), error
from lowtri.auditing.loading import load_target
assert load_target(sys.argv[1] + ":make").model(x) is x
cache = lowtri.KVCache("causal & window(8)")
assert np.allclose(cache.attend(q, k, v), output)
lowtri.scaled_dot_product_attention(q, k, v, is_causal=True)
print(lowtri.which_engine(q, k, v, "causal"))
lowtri.assert_causal(lambda x: np.cumsum(x, 1), q[:, 0, :12, :3])
report = lowtri.audit(lambda x: x - x.mean(1, keepdims=True), q[:, 0, :12, :3])
assert not report.ok and report.leaks, report
assert str(lowtri.infer_mask(lambda x: np.cumsum(x, 1), q[:, 0, :12, :3])) == "causal"
lowtri.explain((q[0, 0, :4], k[0, 0, :4], v[0, 0, :4]), mask="causal")
lowtri.parallel.plan_shards("causal & window(200)", 1024, 4)
lowtri.mask("causal & window(3)").draw(8)
"""


def run(program: str, *arguments: str, without: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    start = ABSENT % (without,)
    return subprocess.run(
        [sys.executable, "-c", start + program, *arguments], capture_output=True, text=True, timeout=300
    )


def test_numpy_alone(tmp_path: Path) -> None:
    file = tmp_path / "my_model.py"
    file.write_text("def make():\n    return (lambda x: x), [[1.0]]\n")
    done = run(NUMPY_ALONE, str(file), without=tuple(extras.EXTRAS))
    assert done.returncode == 0, done.stderr
    assert "formula    no: it computes with torch, which is not installed" in done.stdout


WITHOUT_TORCH = """
import lowtri

lines = ["lowtri.nn", "lowtri.verify", "lowtri.plain.MaskedSelfAttention", "import lowtri.nn"]
lines += [f"import lowtri.integrations.{name}" for name in ("flex", "flash_attn", "torch", "transformers")]
lines += [f"lowtri.audit(lambda x: x, [[1.0, 2.0]], {option})" for option in ("redraw=True", "conditions='compiled'")]
for line in lines:
    try:
        exec(line)
    except ImportError as error:
        print(type(error).__name__, error)
"""


def test_what_needs_torch_says_so() -> None:
    done = run(WITHOUT_TORCH, without=("torch", "transformers"))
    names = ["lowtri.nn", "lowtri.verify", "lowtri.plain.MaskedSelfAttention", "lowtri.nn"]
    names += [f"lowtri.integrations.{name}" for name in ("flex", "flash_attn", "torch")]
    said = [needs(name, "torch") for name in names]
    said.append(needs("lowtri.integrations.transformers", "torch transformers"))
    said += [needs(f"audit: {option}", "torch") for option in ("redraw=", 'conditions="compiled"')]
    assert done.stdout == "".join(f"ExtraError {words}" for words in said), done.stderr


def test_the_textbook_formulas_in_numpy_need_no_torch() -> None:
    """Neither the import, nor a call, nor `import *`; a name of torch is still there, and says what is missing."""
    done = run(
        """
import numpy as np
import lowtri.plain
from lowtri.plain import *

x = np.eye(3)[None]
output, weights = masked_self_attention(x, x, x, make_causal_mask(3))
assert np.array_equal(weights, self_attention(x)[1] * 0 + weights) and weights[0, 0].tolist() == [1, 0, 0]
assert softmax(np.zeros(2)).tolist() == [0.5, 0.5] and "MaskedSelfAttention" in dir(lowtri.plain)
try:
    lowtri.plain.create_causal_mask(3)
except lowtri.ExtraError as error:
    print(error)
""",
        without=("torch",),
    )
    missing = "lowtri.plain.create_causal_mask needs torch, which is not installed.\nFix: pip install torch\n"
    assert done.stdout == missing, done.stderr


def test_the_doctor_without_torch() -> None:
    done = run("from lowtri.__main__ import main\nsys.exit(main())", "doctor", without=("torch",))
    assert "needs torch, which is not installed.\nFix: pip install torch" in done.stdout, done.stderr
    assert "the kernels run on Python's threads" in done.stdout and "target " in done.stdout
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("absent", "says"), [("numpy", "numpy, which is"), ("numpy torch", "numpy and torch, which are")]
)
def test_the_doctor_without_numpy(absent: str, says: str) -> None:
    program = "from lowtri.__main__ import main\nsys.exit(main())"
    done = run(program, "doctor", "--threads", "2", without=tuple(absent.split()))
    assert done.stdout == f"missing   lowtri needs {says} not installed.\nFix: pip install {absent}\n"
    assert (done.returncode, done.stderr) == (1, "")
    assert '"trouble"' in run(program, "doctor", "--json", without=tuple(absent.split())).stdout


def test_what_needs_another_package_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lowtri.nn import Decoder, DecoderConfig
    from lowtri.pretrained import find_model, read_model

    model = Decoder(DecoderConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    model.save(tmp_path / "saved")
    for name in ("rich", "safetensors", "transformers", "gguf"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "weights = softmax" in str(explain(([[1.0]], [[1.0]], [[1.0]]), mask="causal")), "text needs no package"
    for needs in (lambda: model.save(tmp_path / "model"), lambda: Decoder.load(tmp_path / "saved")):
        with pytest.raises(ExtraError, match=r"needs safetensors, .*\nFix: pip install safetensors$"):
            needs()
    assert not (tmp_path / "model").exists()
    (tmp_path / "saved" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ExtraError, match=r"needs transformers, .*\nFix: pip install transformers$"):
        read_model(tmp_path / "saved")
    with pytest.raises(ExtraError, match=r"needs gguf, .*\nFix: pip install gguf$"):
        find_model(tmp_path / "m.gguf")


def needs(who: str, missing: str) -> str:
    """That someone needs packages, which are named in their order, and how they are installed."""
    *first, last = missing.split()
    named, verb = (f"{', '.join(first)} and {last}", "are") if first else (last, "is")
    return f"{who} needs {named}, which {verb} not installed.\nFix: pip install {missing}\n"


@pytest.mark.parametrize(
    ("arguments", "absent", "who", "missing"),
    [
        ("mask causal", "typer", "the command lowtri", "typer"),
        ("mask causal", "typer rich", "the command lowtri", "typer rich"),
        ("generate model prompt", "torch", "lowtri generate", "torch"),
        ("generate model prompt", "typer rich torch transformers", "lowtri generate", "typer rich torch transformers"),
        ("generate --help", "typer torch", "the command lowtri", "typer"),
        ("verify a.py:f", "rich torch", "lowtri verify", "rich torch"),
        ("bench", "torch", "lowtri bench", "torch"),
        ("lesson", "torch", "lowtri lesson", "torch"),
        ("explain a --model=m", "typer torch", "lowtri explain", "typer torch"),
        ("explain a --model=m", "torch transformers", "lowtri.integrations.transformers", "torch transformers"),
        ("audit folder", "torch", "", "torch"),
        ("mask causal", "numpy", "this command", "numpy"),
    ],
)
def test_the_command_line_says_all_that_is_missing(arguments: str, absent: str, who: str, missing: str) -> None:
    program = "from lowtri.__main__ import main\nsys.exit(main())"
    done = run(program, *arguments.split(), without=tuple(absent.split()))
    assert done.stderr.endswith(needs(who, missing)) and done.stderr.startswith("lowtri: ")
    assert done.returncode == 2, done.stderr


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [line.split(">")[0] for line in project["dependencies"]] == ["numpy"]
    for package, extra in extras.EXTRAS.items():
        assert any(line.split(">")[0] == package for line in project["optional-dependencies"][extra]), package


def test_every_missing_package_is_named() -> None:
    with pytest.raises(ExtraError, match=r"^this needs gguf, which is not installed\.\nFix: pip install gguf$"):
        raise ExtraError(extras.missing("this", "gguf"))
