"""The system's Chromium, without a screen; tests that need it skip themselves where there is none.

A module that uses the fixture imports it by name.
"""

import shutil

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
EXECUTABLE = next((path for name in BROWSERS if (path := shutil.which(name))), None)

needs_browser = pytest.mark.skipif(
    EXECUTABLE is None, reason="needs Chromium, as from the system's packages"
)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=EXECUTABLE)
        yield browser
        browser.close()
