"""What which_engine's answer shows of itself."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from lowtri.dispatch.choose import Choice

SPACE = "{http://www.w3.org/2000/svg}"


def test_bars_for_engines_that_can_run_and_reasons_for_the_others() -> None:
    answers = {"fast": "yes", "slow": "yes", "none": "no: <script>", "formula": "yes"}
    choice = Choice("fast", "the cheapest that supports the call", answers, {"fast": 10.0, "slow": 1e4, "formula": 1e9})
    root = ET.fromstring(choice._repr_svg_())
    words = [node.text for node in root.iter(f"{SPACE}text")]
    assert words[0] == "fast runs: the cheapest that supports the call" == root.findtext(f"{SPACE}title")
    assert [word for word in words if word in answers] == list(answers)
    assert "no: <script>" in words and "0.01 ms" in words and "10 ms" in words and "a last resort" in words
    bars = [node for node in root.iter(f"{SPACE}rect") if node.get("height") == "20"]
    assert [bar.get("class") for bar in bars] == ["lowtri-visible", "lowtri-partly"]
    assert float(bars[1].attrib["width"]) > float(bars[0].attrib["width"]) > 0
    assert "<script" not in choice._repr_html_() and choice._repr_html_().count("<tr>") == 5


def test_one_engine_and_none_with_a_cost() -> None:
    for costs in ({"a": 0.0}, {}):
        ET.fromstring(Choice("a", "requested by name", {"a": "yes"}, costs)._repr_svg_())
