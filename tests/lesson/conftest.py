"""What the tests in a browser share: the page in every language, and a browser for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser

from lowtri.lesson.languages import LANGUAGES
from lowtri.lesson.page import file_name, write_lesson


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lesson")
    for language in LANGUAGES:
        write_lesson(folder / file_name(language), language)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()
