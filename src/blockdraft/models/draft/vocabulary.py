"""The tokens that a drafter bothers to guess.

Reading the whole head costs a small drafter as much as its layers. Almost all answers use a small
part of the vocabulary, so a checkpoint may name that part in a file beside its weights (as FR-Spec
does, arXiv 2502.14856). Other engines ignore the file and read the whole head. The target still
chooses from everything; a token outside is never guessed, and costs one rejected draft.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from blockdraft.core.errors import ModelError
from blockdraft.core.files import read_json, replace_file

FILE_NAME = "draft_vocabulary.json"


def write_draft_vocabulary(folder: Path, token_ids: Iterable[int] | None) -> None:
    """Write the ids beside a checkpoint, ascending; None removes those of an earlier one.

    The file appears whole or not at all.
    """
    if token_ids is None:
        (folder / FILE_NAME).unlink(missing_ok=True)
        return
    text = json.dumps(sorted(set(token_ids))) + "\n"
    replace_file(folder / FILE_NAME, lambda part: part.write_text(text, encoding="utf-8"))


def read_draft_vocabulary(folder: Path, vocab_size: int) -> list[int] | None:
    """The ids, ascending; None if the checkpoint guesses from the whole vocabulary.

    Raises:
        ModelError: the file is damaged, or names a token outside the vocabulary.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return None
    try:
        ids = read_json(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path} ({error}); copy the checkpoint again") from error
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise ModelError(
            f"{path} is not a list of token ids; copy the checkpoint again, or delete it"
        )
    wrong = [i for i in ids if not 0 <= i < vocab_size]
    if wrong:
        raise ModelError(
            f"{path} names token {wrong[0]}, outside the vocabulary of {vocab_size}; it belongs to "
            "another target, delete it"
        )
    return sorted(set(ids))
