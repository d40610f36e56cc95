"""Count the n-grams of answers, as the end of a training run does, for a drafter that exists.

    python tools/count_ngrams.py DRAFTER ANSWERS [ANSWERS]...

Writes ngrams.safetensors into the drafter's folder.
"""

import argparse
from pathlib import Path

from blockdraft.core.errors import BlockdraftError
from blockdraft.data.dataset import read_examples
from blockdraft.models.draft.checkpoint import read_config
from blockdraft.speculate.drafters.ngram_table import NGRAMS_NAME, NGramTable


def main() -> None:
    """Count and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafter", type=Path, help="folder")
    parser.add_argument("answers", type=Path, nargs="+", help="files or folders of answers")
    args = parser.parse_args()
    read_config(args.drafter)  # a folder that holds none is said before the answers are counted
    texts = read_examples(args.answers, min_response_len=1, max_len=2**30)
    table = NGramTable.count((text.token_ids, len(text.prompt_ids)) for text in texts)
    table.save(args.drafter)
    size = (args.drafter / NGRAMS_NAME).stat().st_size
    print(f"{len(texts)} answers, {table.num_contexts} contexts, {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    try:
        main()
    except BlockdraftError as error:
        raise SystemExit(f"{Path(__file__).name}: {error}") from error
