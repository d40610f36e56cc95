"""The truth while training: tau of real decoding, by the engine that serves."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedModel

from blockdraft.core.request import SamplingParams
from blockdraft.engine.engine import Engine
from blockdraft.engine.stats import AcceptanceStats
from blockdraft.models.draft import DraftModel
from blockdraft.models.loading import load_target_model, resolve_dtype
from blockdraft.models.sequential import SequentialTarget
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.text.kinds import loops
from blockdraft.text.tokenizer import load_tokenizer
from blockdraft.train.prompts import Prompt, chat_ids

TrueTau = Callable[[DraftModel, Callable[[], object]], Mapping[str, float]]
"""Acceptance lengths of real decoding, by whatever names; the second argument is called again and
again meanwhile, so that a clock can tell work from a stopped process."""


def true_tau_on(
    prompts: Sequence[Prompt], target: Path, *, max_tokens: int, dtype: str, device: str
) -> TrueTau:
    """A measure of a drafter: greedy decoding of `prompts`, tau by set and over all.

    Keys are the sets, "all", and "all without loops". The target is loaded once; the drafter is
    copied to the target's precision each time.
    """
    tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    eos_ids = load_tokenizer(target).eos_ids
    encoded = [(prompt.set, chat_ids(tokenizer, prompt.text)) for prompt in prompts]
    model = load_target_model(target, resolve_dtype(dtype, device), device)
    params = SamplingParams(max_tokens=max_tokens)

    def measure(drafter: DraftModel, tick: Callable[[], object]) -> Mapping[str, float]:
        totals: dict[str, AcceptanceStats] = {}
        with SequentialTarget(
            model, layer_ids=drafter.config.target_layer_ids
        ).released_after() as sequential:
            engine = Engine(sequential, _serving(drafter, model))
            for name, prompt_ids in encoded:
                key = engine.add(prompt_ids, params, eos_ids=eos_ids)
                while engine.has_work:
                    engine.step()
                    tick()
                progress = engine.take(key)
                names = [name, "all"]
                if not loops(progress.sequence.output_ids):
                    names.append("all without loops")
                for counted in names:
                    totals.setdefault(counted, AcceptanceStats()).add(progress.acceptance)
        return {name: stats.acceptance_length for name, stats in totals.items()}

    return measure


def _serving(drafter: DraftModel, model: PreTrainedModel) -> DFlashDrafter:
    """A copy in the target's precision: the one being trained stays as it is."""
    copy = DraftModel(drafter.config).to(device=model.device, dtype=model.dtype)
    copy.load_state_dict(drafter.state_dict())
    embed = model.get_input_embeddings().weight
    return DFlashDrafter(copy.eval(), embed, model.get_output_embeddings().weight)
