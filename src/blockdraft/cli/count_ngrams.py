"""`blockdraft count-ngrams`: a table of n-grams for a drafter that exists."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from blockdraft.cli import options
from blockdraft.cli.output import print_json
from blockdraft.core.errors import ConfigError


def count_ngrams(
    drafter: Annotated[Path, typer.Argument(help="Folder of a drafter.")],
    answers: Annotated[
        list[Path],
        typer.Argument(help="Folders or files of answers, such as `blockdraft data` writes."),
    ],
    as_json: options.Json = False,
) -> None:
    """Count which tokens follow which in a target's answers, to draft from these n-grams.

    The table is written next to the drafter's weights and replaces an existing one. `train` ends by
    counting the answers that it trained on.
    """
    from blockdraft.core.files import check_output_folder, full_disk_refused
    from blockdraft.data.dataset import read_examples
    from blockdraft.data.ngrams import count_ngrams as count
    from blockdraft.models.draft.checkpoint import read_config
    from blockdraft.speculate.drafters.ngram_table import NGRAMS_NAME

    check_output_folder(drafter)
    config = read_config(drafter)  # a folder that holds none is said before answers are counted
    _check_target(drafter, answers)
    texts = read_examples(answers, min_response_len=1, max_len=None)
    largest, vocab_size = max(max(text.token_ids) for text in texts), config.get("vocab_size")
    if isinstance(vocab_size, int) and largest >= vocab_size:
        raise ConfigError(
            f"the answers have a token {largest}, and the target of {drafter} only those below "
            f"{vocab_size}: another target wrote them; give its own answers"
        )
    table, num_counted = count(texts)
    with full_disk_refused(drafter):
        table.save(drafter)
    path = drafter / NGRAMS_NAME
    if as_json:
        print_json(
            {
                "table": str(path),
                "answers": num_counted,
                "contexts": table.num_contexts,
                "bytes": path.stat().st_size,
            }
        )
        return
    typer.echo(path)


def _check_target(drafter: Path, answers: Sequence[Path]) -> None:
    """Refuse a folder of answers that another target wrote than the drafter's, where both say.

    And one that the `drafter` wrote: it is the target, which would have another hash from then on.
    """
    from blockdraft.data.identity import target_sha256
    from blockdraft.data.shards import read_manifest, target_named
    from blockdraft.models.draft.checkpoint import read_provenance

    target = read_provenance(drafter).get("target")
    own = target.get("weights_sha256") if isinstance(target, dict) else None
    for path in answers:
        manifest = (read_manifest(path) if path.is_dir() else None) or {"target": {}}
        found = manifest["target"].get("weights_sha256")
        if None not in (own, found) and own != found:
            raise ConfigError(
                f"the answers in {path} are of another target than that of {drafter}, "
                f"{target_named(manifest)}; give its own answers"
            )
        if manifest["target"].get("sha256") == target_sha256(drafter):
            raise ConfigError(
                f"{drafter} is the target that wrote the answers in {path}, not a drafter for it; "
                "give the folder of a drafter"
            )
