"""From the name of a model to a folder that holds it."""

import difflib
import logging
import re
from pathlib import Path

from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import DiskError, ModelError, NetworkError
from blockdraft.core.files import FULL
from blockdraft.hub.catalog import (
    CATALOG,
    CatalogEntry,
    PackageFolder,
    WheelFile,
    find_drafter,
)
from blockdraft.hub.folder import INDEX_NAME, MASK_FILE, missing_parts
from blockdraft.hub.prepare import prepare_gguf, prepare_wheel_model

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[A-Za-z0-9][\w./-]*))?"
)
_AT_THE_TOP = ("*.json", "*.safetensors", "*.model", "*.txt", "*.py", MASK_FILE)
_HUB_PATTERNS = (*_AT_THE_TOP, "*.jinja")
_HUB_LEFT_OUT = (
    # Subfolders hold the same weights in other formats (gpt-oss: three times the size), and so do
    # consolidated files (Mistral: twice the size). Chat templates for tools may lie in one too.
    *(f"*/{pattern}" for pattern in _AT_THE_TOP),
    "consolidated*.safetensors",
)
_CONFIG_PATTERNS = (
    *("config.json", INDEX_NAME, "provenance.json", "draft_vocabulary.json"),
    "*.py",
)


def resolve_model(name: str) -> Path:
    """Return the absolute folder of a model, fetching it first where that is needed.

    Args:
        name: in this order, a model that blockdraft brings itself (so `smollm2-135m` means the
            same in every working directory), a local folder or GGUF file, or a hub id `org/name`;
            the catalog's published pairs are hub ids like any other. `org/name@revision` is a
            branch, tag or commit of it.

    Raises:
        ModelError: the name is unknown, or the folder is incomplete.
        NetworkError, DiskError: fetching failed.
    """
    entry = CATALOG.get(name)
    if entry is not None and entry.source is not None:
        return _embedded(entry, entry.source)
    folder = Path(name).expanduser().absolute()
    if name and folder.is_dir():
        return _whole(folder, "copy the missing files there")
    if folder.suffix == ".gguf" and folder.is_file():
        return prepare_gguf(folder)
    if found := hub_id(name):
        snapshot = _snapshot(found["repo"], found["revision"])
        return _whole(
            snapshot,
            "run again with a network to fetch the rest, or use a repository with safetensors "
            "weights",
        )
    raise ModelError(
        f"there is no model {name!r}: it is not a known name, a folder, a GGUF file, or a hub id "
        "(org/name or org/name@revision); "
        f"{_suggestion(name) or '`blockdraft models` lists the known names'}"
    )


def resolve_config(name: str) -> Path:
    """The folder of a model's config; of a hub id only that is fetched.

    Args:
        name: see `resolve_model`. The model that comes out of a wheel is fetched whole.

    Raises:
        ModelError: the name is unknown, or there is no config.
        NetworkError, DiskError: fetching failed.
    """
    entry, found = CATALOG.get(name), hub_id(name)
    folder = Path(name).expanduser().absolute()
    is_embedded = entry is not None and entry.source is not None
    if is_embedded or not (found or folder.is_dir()):
        return resolve_model(name)
    if not folder.is_dir():
        assert found is not None
        folder = _snapshot(found["repo"], found["revision"], _CONFIG_PATTERNS)
    if not (folder / "config.json").is_file():
        raise ModelError(f"model folder {folder} lacks config.json; copy the missing file there")
    return folder


def resolve_drafter(config: LLMConfig, target_folder: Path) -> Path | None:
    """Return the folder of the drafter that a configuration asks for, None for plain decoding.

    Args:
        config: its drafter "auto" is the one known for its target; without one, or where the hub
            does not give it (several are gated), a line in the log says so.
        target_folder: what the target was resolved to.

    Raises:
        ModelError, NetworkError, DiskError: see `resolve_model`.
    """
    if config.drafter is None or not config.names_drafter:
        return None
    if config.drafter != "auto":
        return resolve_model(config.drafter)
    name = find_drafter(config.target) or find_drafter(str(target_folder))
    if name is None:
        logger.warning(
            "no drafter is known for %s: plain decoding; give one with --drafter", config.target
        )
        return None
    try:
        return resolve_model(name)
    except NetworkError as error:
        raise NetworkError(f"{error}, or decode without a drafter: --drafter none") from error
    except ModelError as error:
        if CATALOG[name].source is not None:
            raise
        logger.warning("%s: plain decoding; give another drafter with --drafter", error)
        return None


def hub_id(name: str) -> re.Match[str] | None:
    """The parts of a hub id; None for what is none, such as the path of a GGUF file."""
    return None if name.endswith(".gguf") else _HUB_ID.fullmatch(name)


def _embedded(entry: CatalogEntry, source: WheelFile | PackageFolder) -> Path:
    if isinstance(source, WheelFile):
        return prepare_wheel_model(entry.name, source)
    return _whole(source.path, f"this installation lacks {entry.name}, reinstall blockdraft")


def _whole(folder: Path, remedy: str) -> Path:
    if missing := missing_parts(folder):
        if (folder / "adapter_config.json").is_file():
            raise ModelError(
                f"{folder} holds an adapter (LoRA) and not a whole model; merge it into its base "
                "model, and give the merged folder"
            )
        raise ModelError(f"model folder {folder} lacks {', '.join(missing)}; {remedy}")
    return folder


def _snapshot(
    repo_id: str, revision: str | None, patterns: tuple[str, ...] = _HUB_PATTERNS
) -> Path:
    """Download what a model needs of a repository, or find it in the hub's own cache."""
    import huggingface_hub  # slow to import, and needed for hub ids only
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    logger.info("looking for %s on the Hugging Face hub", repo_id)
    try:
        folder = huggingface_hub.snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(_HUB_LEFT_OUT),
        )
    except GatedRepoError as error:
        raise ModelError(
            f"{repo_id} is gated; ask for access on its hub page and log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(
            f"{repo_id} has no revision {revision!r}; give one of its branches, tags or commits"
        ) from error
    except RepositoryNotFoundError as error:
        remedy = _suggestion(repo_id) or "check the name, or log in with `hf auth login`"
        raise ModelError(
            f"there is no folder {repo_id} here, and the hub has no repository of that name; "
            f"{remedy}"
        ) from error
    except Exception as error:  # its HTTP library, and so the errors, differ between versions
        first = str(error).strip().split("\n")[0].removeprefix("Got: ")
        reason = first.rstrip(".") or type(error).__name__
        if getattr(error, "errno", None) in FULL:
            raise DiskError(f"cannot get {repo_id} from the hub: {reason}; free space") from error
        raise NetworkError(
            f"there is no folder {repo_id} here, and it cannot be fetched from the hub: {reason}; "
            "check the network, or give a local folder"
        ) from error
    return Path(folder)


def _suggestion(name: str) -> str:
    folded = {known.casefold(): known for known in CATALOG}
    nearest = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.5)
    return f"did you mean {folded[nearest[0]]!r}?" if nearest else ""
