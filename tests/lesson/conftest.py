"""What the tests in a browser share: the page in every language, and a browser for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, chromium
from lesson_pages import LessonPage, opened

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
    if chromium() is None:
        pytest.skip("no browser: apt-get install chromium")
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope="module", params=LANGUAGES)
def page(request: pytest.FixtureRequest, browser: Browser, folder: Path) -> Iterator[LessonPage]:
    page = opened(browser, folder, request.param, width=1200)
    yield page
    assert page.problems() == []
    page.close()
