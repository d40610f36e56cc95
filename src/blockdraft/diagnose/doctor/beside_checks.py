"""What lies beside a drafter's weights and drafts too: a table of n-grams and a Hydra head."""

from collections.abc import Callable, Sequence

from blockdraft.core.errors import ModelError
from blockdraft.diagnose.doctor.check import Check
from blockdraft.diagnose.doctor.pair import Pair
from blockdraft.models.draft.hydra_head import HydraHead
from blockdraft.speculate.drafters.ngram_table import NGramTable


def beside_checks(pair: Pair) -> list[Check]:
    """A line for each; none for a head that this device or this drafter has no use for."""
    if not pair.config.ngrams:
        return [Check("n-grams", "ok", "switched off")]
    checks = [_read("n-grams", lambda: _table_check(pair))]
    known = pair.shape.target_layer_ids if pair.shape is not None else ()
    if pair.device == "cpu" and known:
        checks.append(_read("hydra head", lambda: _head_check(pair, known)))
    return checks


def _read(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except ModelError as error:
        return Check(name, "out", str(error))


def _table_check(pair: Pair) -> Check:
    table = NGramTable.load(pair.drafter_folder, pair.num_rows)
    if table is None:
        remedy = (
            "`blockdraft count-ngrams DRAFTER ANSWERS` counts one in seconds, from answers that "
            "`blockdraft data` writes"
        )
        return Check("n-grams", "warning", "the drafter has no table of them", remedy)
    return Check("n-grams", "ok", f"a table of {table.num_contexts} contexts")


def _head_check(pair: Pair, known: Sequence[int]) -> Check:
    """known: layers that the drafter reads."""
    hidden_size = pair.target_config.hidden_size
    head = HydraHead.load(pair.drafter_folder, hidden_size, pair.num_rows)
    if head is None:
        remedy = "`blockdraft train-head DRAFTER ANSWERS` trains one, in ten minutes on a CPU"
        return Check("hydra head", "warning", "the drafter has none", remedy)
    layers = ", ".join(map(str, head.shape.target_layer_ids))
    if not set(head.shape.target_layer_ids) <= set(known):
        found = f"reads layers {layers}, and the drafter {', '.join(map(str, known))}"
        remedy = (
            "if the drafter's layer ids are right: delete the head, or train another one with "
            "`blockdraft train-head DRAFTER ANSWERS`"
        )
        return Check("hydra head", "out", found, remedy)
    return Check("hydra head", "ok", f"predicts {len(head.token_ids)} tokens from layers {layers}")
