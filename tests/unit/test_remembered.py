"""What a start remembers of an earlier one, and when it does not."""

import json
import logging
import os
from pathlib import Path

import pytest

from blockdraft.core import remembered
from blockdraft.core.fingerprint import hash_files, sample_files
from blockdraft.core.remembered import MAX_FILES, once, remembering

KEY = {"weights": "a", "threads": 2}


@pytest.fixture(autouse=True)
def _on(monkeypatch):
    monkeypatch.delenv(remembered.SWITCH, raising=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "starts" / "one.json"


def start(path: Path, key: dict[str, object] = KEY, *, recheck: bool = False) -> list[str]:
    """What one start finds out itself."""
    ran: list[str] = []

    def find(name: str, value: object) -> object:
        def find_out() -> object:
            ran.append(name)
            return value

        return once(name, find_out)

    with remembering(path, key, recheck=recheck):
        assert find("test", True) is True
        assert find("layer", "whole") == "whole"
        assert find("layer", "parts") == "parts"  # the next of several
        assert find("costs", [[1, 0.5]]) == [[1, 0.5]]
    return ran


ALL = ["test", "layer", "layer", "costs"]


def test_the_second_start_finds_out_nothing(path):
    assert start(path) == ALL
    assert start(path) == []


def test_outside_of_a_start_everything_is_found_out():
    assert [once("test", lambda: 1), once("test", lambda: 2)] == [1, 2]


def test_what_does_not_hold_is_found_out_again(path):
    def start_with(value: int, *, holds: bool) -> int:
        with remembering(path, KEY, recheck=False):
            return once("costs", lambda: value, lambda _: holds)

    assert start_with(1, holds=False) == 1  # nobody is asked about what is new
    assert start_with(2, holds=True) == 1
    assert start_with(3, holds=False) == 3
    assert start_with(4, holds=True) == 3


def test_another_key_or_recheck_finds_out_again(path):
    start(path)
    assert start(path, KEY | {"threads": 1}) == ALL
    assert start(path, KEY | {"threads": 1}) == []
    assert start(path, KEY | {"threads": 1}, recheck=True) == ALL


def test_only_its_user_may_read_and_write_the_file(path):
    start(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def _damage_text(path: Path) -> None:
    path.write_text(path.read_text()[:-20])


def _damage_number(path: Path) -> None:
    path.write_text(path.read_text().replace("0.5", "0.6"))


def _damage_shape(path: Path) -> None:
    path.write_text(json.dumps([1, 2]))


def _open_to_others(path: Path) -> None:
    path.chmod(0o666)


@pytest.mark.parametrize(
    "damage",
    [_damage_text, _damage_number, _damage_shape, _open_to_others],
    ids=lambda f: f.__name__,
)
def test_in_doubt_everything_is_found_out_again(path, damage, caplog):
    start(path)
    damage(path)
    with caplog.at_level(logging.INFO, logger="blockdraft"):
        assert start(path) == ALL
    assert "tests run again" in caplog.text
    assert start(path) == []


def test_a_start_that_fails_remembers_nothing(path):
    def fail() -> None:
        with remembering(path, KEY, recheck=False):
            once("test", lambda: True)
            once("another", lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        fail()
    assert start(path) == ALL


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_hinders_nothing(path):
    path.parent.mkdir(mode=0o500)
    assert start(path) == start(path) == ALL


def test_what_cannot_be_written_hinders_nothing(path):
    path.parent.write_text("a file where the folder would be")
    assert start(path) == start(path) == ALL


def test_the_oldest_files_go(path):
    for number in range(MAX_FILES + 3):
        start(path.with_name(f"{number}.json"), KEY | {"threads": number})
    assert len(list(path.parent.iterdir())) == MAX_FILES


def test_it_can_be_switched_off(path, monkeypatch):
    monkeypatch.setenv(remembered.SWITCH, "off")
    assert start(path) == start(path) == ALL
    assert not path.exists()


def test_samples_tell_files_apart(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(5_000_000))
    os.utime(path, ns=(0, 0))
    found = [sample_files(tmp_path, ["*.safetensors"])]
    with path.open("r+b") as file:
        file.seek(4_990_000)
        file.write(b"x")
    os.utime(path, ns=(0, 0))
    found.append(sample_files(tmp_path, ["*.safetensors"]))  # another content
    os.utime(path, ns=(1, 1))
    found.append(sample_files(tmp_path, ["*.safetensors"]))  # written again
    path.rename(tmp_path / "other.safetensors")
    found.append(sample_files(tmp_path, ["*.safetensors"]))
    assert len(set(found)) == 4
    assert hash_files(tmp_path, ["*.json"]) == hash_files(tmp_path, ["*.txt"])
