"""A hash of what a model's weights are, however its files are cut and whatever they are called."""

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from blockdraft.core.errors import ModelError
from blockdraft.core.fingerprint import hash_files
from blockdraft.hub.folder import gguf_file


def weights_sha256(folder: Path) -> str:
    """SHA-256 over name, precision, shape and bytes of every tensor, in the order of the names.

    The safetensors files of the folder are read whole. Shards, metadata and the config's text do
    not count: a model that was only saved again keeps its hash. Of a GGUF file the bytes count.
    `core.fingerprint` lists the other hashes of models.

    Raises:
        ModelError: a file is damaged, or there is none.
    """
    if (path := gguf_file(folder)) is not None:
        return hash_files(folder, (path.name,))
    where: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                where |= dict.fromkeys(file.keys(), path)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {path} ({error}); copy the model again") from error
    if not where:
        raise ModelError(f"{folder} holds no safetensors weights; copy the model again")
    digest = hashlib.sha256()
    for name in sorted(where):
        with safe_open(where[name], framework="pt") as file:
            tensor = file.get_tensor(name)
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        # memoryview knows no bfloat16.
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
