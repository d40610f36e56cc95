"""Tiny pairs, loaded once a module."""

from pathlib import Path

import pytest

from blockdraft import LLM
from tests.small_llm import load_llm, without_pages
from tests.tiny import tiny_drafter_folder, tiny_target_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a drafter for it."""
    root = tmp_path_factory.mktemp("pair")
    return tiny_target_folder(root), tiny_drafter_folder(root)


@pytest.fixture(scope="module")
def pair(folders: tuple[Path, Path]) -> list[str]:
    """Both, as options of a command."""
    return ["--target", str(folders[0]), "--drafter", str(folders[1]), "--dtype", "float32"]


@pytest.fixture(scope="module", params=["paged", "sequential"])
def llm(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> LLM:
    """Both, loaded: all sequences in one forward, or one after another."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "sequential":
            patch.setattr("blockdraft.models.target.paged.layer_shapes", without_pages)
        return load_llm(folders)
