"""A target that answers, for the tests of answers."""

from pathlib import Path

import pytest

from tests.tiny import tiny_target_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target_folder(tmp_path_factory.mktemp("target"))
