"""The report: message first, a drawing, JSON, HTML, exit codes; the command and the pytest plugin."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from model_files import decoder_folder, recurrent_folder, transformers_folder

import lowtri
from lowtri.auditing.loading import load_target
from lowtri.auditing.report import cells, draw_text
from lowtri.cli.main import main
from lowtri.errors import DataError

LEAKS = Path(__file__).parents[2] / "examples" / "leaks"
SPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def leaking() -> lowtri.AuditReport:
    def off_by_one(x: np.ndarray) -> np.ndarray:
        return np.array([x[max(0, t - 2) : t + 2].sum(0) for t in range(len(x))])

    x = np.random.default_rng(0).standard_normal((6, 3))
    return lowtri.audit(off_by_one, x, mask="causal & window(4)")


def test_the_measured_mask_and_the_message_come_first(leaking: lowtri.AuditReport) -> None:
    first, *lines = str(leaking).splitlines()
    assert first == "measured mask: band(2, 1)" and lines[0] == leaking.message
    first = "position 0 sees position 1: changing input 1 moves output 0 by "
    assert leaking.message.startswith(f"leak against causal & window(4): {first}")
    assert "(noise 0)." in lines[0]
    assert "off_by_one against causal & window(4), 1 x 6 positions" in lines


def test_the_drawing(leaking: lowtri.AuditReport) -> None:
    assert leaking.draw().splitlines() == [
        "  █✗····",
        "  ██✗···",
        "  ███✗··",
        "  ○███✗·",
        "  ·○███✗",
        "  ··○███",
        "  █ declared and seen   ○ declared, never seen   · hidden   ✗ leak",
    ]


def test_large_drawings_are_bounded() -> None:
    allowed, seen = np.tril(np.ones((500, 500), bool)), np.full((500, 500), np.nan)
    seen[:, 7] = 1.0
    lines = [line.strip() for line in draw_text(cells(allowed, seen, [(3, 480)], 50), 500).splitlines()[:-1]]
    assert len(lines) == 50 and {len(line) for line in lines} == {50}
    assert lines[0][48] == "✗" and lines[49][0] == "█" and lines[49][20] == "▒" and lines[0][20] == "·"


def test_json(leaking: lowtri.AuditReport) -> None:
    data = json.loads(leaking.to_json())
    assert (data["verdict"], data["ok"], data["exit_code"]) == ("leak", False, 1)
    assert data["leaks"][0]["query"] == 0 and data["leaks"][0]["key"] == 1
    assert data["leaks"][0]["message"].startswith("position 0 sees position 1")
    before = ["state", "change", "gradient", "prefix", "batch", "padding", "source", "packing", "cache"]
    assert [finding["probe"] for finding in data["findings"]] == [*before, "", "", "", "poison", "sensitivity"]
    assert [f["condition"] for f in data["findings"] if not f["probe"]] == ["code_paths", "training", "longer"]
    change = data["findings"][1]
    assert change["measured"]["every_pair"] and change["measured"]["keys"] == 6
    assert data["noise"]["repeat"] == 0


def test_html(leaking: lowtri.AuditReport) -> None:
    page = leaking.to_html()
    assert page.startswith("<!doctype html>") and "http" not in page
    for name, count in (("leak", 5), ("outline", 3)):
        assert page.count(f'class="lowtri-{name}"') == count + 1  # and the legend's
    assert "position 0 sees position 1" in page and "causal &amp; window(4)" in page


def test_the_picture_says_what_it_shows(leaking: lowtri.AuditReport) -> None:
    picture = leaking.to_svg()
    root = ET.fromstring(picture)
    cells = [node for node in root.iter(f"{SPACE}rect") if node.find(f"{SPACE}title") is not None]
    swatches = [node for node in root.iter(f"{SPACE}rect") if node.get("width") == "14"]
    assert {node.get("class") for node in cells} == {node.get("class") for node in swatches}
    words = [node.text for node in root.iter(f"{SPACE}text")]
    assert {"declared and seen", "declared, never seen", "hidden", "leak", "keys →", "queries →"} <= set(words)
    assert (
        "<title>query 0, key 1: leak</title>" in picture and "<title>query 2, keys 0 to 2: declared and seen" in picture
    )
    wide = lowtri.audit(lambda x: np.cumsum(x, axis=0), np.ones((300, 1)), probes=["change"], length=0).to_svg()
    assert "<title>queries 0 to 4, keys 5 to 299: hidden</title>" in wide and "a cell: 5 x 5 pairs" in wide


@pytest.mark.parametrize("n", [2, 24, 300])
def test_the_page_fits_a_narrow_screen_and_a_dark_one(n: int) -> None:
    report = lowtri.audit(lambda x: x, np.ones((n, 1)) * np.arange(n)[:, None], probes=["change"], length=0)
    page = report.to_html()
    assert (
        '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
        and "overflow-wrap: anywhere" in page
    )
    assert "color-scheme: light dark" in page and "prefers-color-scheme: dark" in page  # the page's and the picture's
    assert float(re.search(r'viewBox="0 0 (\d+) ', page)[1]) <= 390 - 2 * 16 and "svg { max-width: 100%" in page
    edges = [float(x) + float(w) for x, w in re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', page)]
    assert edges and max(edges) <= 340


HOSTILE = "a\u202eb\u2066c\x1b[31md\x00e\u2028f\ud800<script>g"


def test_what_names_and_errors_hold_is_made_visible(tmp_path: Path) -> None:
    def model(x: np.ndarray) -> np.ndarray:
        if len(x) != 6:
            raise ValueError(HOSTILE)
        return x.cumsum(0)

    model.__name__ = HOSTILE
    report = lowtri.audit(model, np.random.default_rng(0).standard_normal((6, 2)))
    for suffix in ("html", "svg", "json", "txt"):
        text = report.save(tmp_path / f"report.{suffix}").read_text(encoding="utf-8")
        assert [c for c in text if not c.isprintable() and c != "\n"] == []
        assert suffix == "svg" or "\\u202e" in text
        assert suffix not in ("svg", "html") or "<script" not in text
    assert json.loads(report.to_json())["model"] == HOSTILE  # as it is, once read back


def test_saving(leaking: lowtri.AuditReport, tmp_path: Path) -> None:
    assert leaking.save(tmp_path / "a.html").read_text(encoding="utf-8") == leaking.to_html()
    assert json.loads(leaking.save(tmp_path / "a.json").read_text(encoding="utf-8"))["ok"] is False
    assert leaking.save(tmp_path / "a.txt").read_text(encoding="utf-8") == str(leaking)
    with pytest.raises(DataError, match=r"a.jpg ends in none of .html, .json, .txt, .svg, .png, .pdf.* Fix: a.svg"):
        leaking.save(tmp_path / "a.jpg")
    assert leaking.save(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.json", "a.png", "a.txt"]


def test_no_leak_found_says_what_was_looked_at() -> None:
    report = lowtri.audit(lambda x: np.cumsum(x, axis=0), np.random.default_rng(0).standard_normal((6, 3)))
    assert report.ok and report.exit_code == 0 and report.first is None
    assert report.message == (
        "no leak found against causal: 1 x 6 and 1 x 256 positions, 2 draws, probes change, prefix, poison, sensitivity; "
        "not tried: state, gradient, batch, padding, source, packing, cache, code_paths, training."
    )
    assert repr(report).startswith("<AuditReport no leak found")


# the files and folders that the command reads


def test_targets(tmp_path: Path) -> None:
    target = load_target(f"{LEAKS / 'wrong' / 'window_ignored.py'}:make_model")
    assert target.mask == "causal & window(3)" and tuple(target.example.shape) == (2, 9, 8)
    (tmp_path / "m.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Embedding(40, 3)\ndef bad():\n    return 3\ndef ill():\n    1 / 0\n"
        "def ends():\n    raise SystemExit(0)\n"
    )
    target = load_target(f"{tmp_path / 'm.py'}:make", length=11)
    assert tuple(target.example.shape) == (2, 11) and int(target.example.max()) < 40
    for text, words in (
        (f"{tmp_path / 'm.py'}", "no function is named.\nFix: FILE.py:make_model"),
        (f"{tmp_path / 'm.py'}:nothing", "has no function 'nothing'"),
        (f"{tmp_path / 'm.py'}:bad", "returns neither a model"),
        (f"{tmp_path / 'm.py'}:ill", "ZeroDivisionError: division by zero"),
        (
            f"{tmp_path / 'm.py'}:ends",
            r"called sys.exit\(0\) when it was imported or called.\nFix: .* under if __name__",
        ),
        (f"{tmp_path / 'absent.py'}:make", "no such file"),
        (str(tmp_path), "has no config.json. Fix: "),
        (str(tmp_path / "absent"), "absent is not a folder or a GGUF file. Fix: "),
        ("", "'' is not a folder or a GGUF file. Fix: the path of one"),
    ):
        with pytest.raises(DataError, match=words):
            load_target(text)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (
            "x, {'maskk': 'causal'}",
            "returns the argument 'maskk', which lowtri.audit does not take.\nFix: one of mask, ",
        ),
        ("x, {'model': sum}", "returns the argument 'model'"),
        ("x, {3: 4}", "returns the argument 3, which"),
        ("x, {'seed': -1}", "seed=-1, expected a whole number"),
        ("{'y': x}", "unexpected keyword argument 'y', on the example itself.\nFix: an example that the model takes"),
        ("[[1.0], [2.0, 3.0]]", "example is a list, not an array"),
    ],
)
def test_a_function_that_returns_something_odd(
    returned: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import numpy as np\nx = np.ones((6, 2))\nf = lambda x: np.cumsum(x, axis=0)\ndef make():\n    return f, "
    (tmp_path / "odd.py").write_text(text + returned)
    assert main(["audit", f"{tmp_path / 'odd.py'}:make"]) == 2
    shown = capsys.readouterr().err
    assert words in shown and shown.count("\n") <= 3 and "Traceback" not in shown


def test_folders_of_ours_and_of_transformers(tmp_path: Path) -> None:
    ours = load_target(str(decoder_folder(tmp_path / "ours", mask="causal & window(5)")))
    assert ours.arguments == {"layers": 2} and repr(ours.mask) == "causal & window(5)"
    theirs = load_target(str(transformers_folder(tmp_path / "theirs", "Mistral", sliding_window=5)))
    assert type(theirs.model).__name__ == "MistralForCausalLM"
    assert (theirs.mask, theirs.arguments) == ("causal & window(5)", {"layers": 2})
    for target in (ours, theirs):
        report = lowtri.audit(
            target.model, target.example, mask=target.mask, **target.arguments, probes=["change"], progress=False
        )
        assert report.ok, report
    recurrent = load_target(str(recurrent_folder(tmp_path / "recurrent")), length=8)
    assert repr(recurrent.mask) == "causal" and recurrent.example.shape == (2, 8)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import typer

    from lowtri.cli.checks import audit as command

    def run(target: str, **options: object) -> int:
        given = {"mask": None, "layers": None, "length": None, "vocab": None, "conditions": None, "redraw": False}
        given |= {
            "traceback": False,
            "probes": None,
            "out": None,
            "seed": 0,
            "threads": None,
            "json": False,
            "infer": False,
        } | options
        try:
            command(target, **given)
        except typer.Exit as end:
            return end.exit_code
        return 0

    wrong, right = (f"{LEAKS / name}.py:make_model" for name in ("wrong/window_off_by_one", "right/gru"))
    assert run(right) == 0
    tried = "2 x 9 and 1 x 256 positions in eval and training mode"
    assert capsys.readouterr().out.startswith(f"measured mask: causal\nno leak found against causal: {tried}")
    assert run(wrong, out=tmp_path / "report.html") == 1
    captured = capsys.readouterr()
    assert (
        captured.out.startswith(
            "measured mask: causal & window(5)\nleak against causal & window(4): position 4 sees position 0"
        )
        and "wrote" in captured.err
    )
    assert (tmp_path / "report.html").exists()
    assert run(wrong, json=True, mask="causal & window(5)") == 0  # the mask that it really has
    assert json.loads(capsys.readouterr().out)["verdict"] == "no leak found"


def test_the_command_refuses_what_it_cannot_run_or_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ends.py"
    file.write_text("import sys\nsys.exit(0)\n")
    assert main(["audit", f"{file}:make"]) == 2
    assert "ends.py:make: called sys.exit(0)" in capsys.readouterr().err
    assert main(["audit", f"{file}:make", "--out", "a.jpg"]) == 2
    assert "a.jpg ends in none of .html, .json, .txt, .svg, .png, .pdf. Fix: a.html" in capsys.readouterr().err
    right = f"{LEAKS / 'right' / 'gru.py'}:make_model"
    assert main(["audit", right, "--length", "1000000000"]) == 2
    assert "Fix: a shorter example, or a smaller length= (--length)" in capsys.readouterr().err
    assert main(["audit", "--help"]) == 0
    assert ".png or .pdf" in " ".join(capsys.readouterr().out.split())
