"""Train a Hydra head for a drafter that exists, on answers of its target.

    python tools/train_hydra.py DRAFTER ANSWERS [ANSWERS]... --states FOLDER --minutes 60

Writes hydra_head.safetensors into the drafter's folder. First the target reads the answers: the
outputs of three of the layers that the drafter reads, and its final states, are kept in --states,
4.6 KB a token with a hidden size of 576. An interrupted run goes on where it was. Then the head
learns, at each place of the answers, the target's distribution over the most frequent tokens: with
the features before that place, and with its own states in place of the last ones. It begins anew,
or with --go-on from the head that the drafter has.
"""

import argparse
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from blockdraft.core.errors import ConfigError
from blockdraft.core.libraries import let_torch_use_matrix_registers
from blockdraft.data.dataset import collate, read_examples
from blockdraft.data.identity import target_sha256
from blockdraft.data.store import Example
from blockdraft.hub.resolve import resolve_model
from blockdraft.models.checkpoint import read_config
from blockdraft.models.draft_config import DraftConfig
from blockdraft.models.hydra_head import HEAD_NAME, HeadShape, HydraHead
from blockdraft.models.loading import load_target_model
from blockdraft.speculate.drafters.kinds import kind_of
from blockdraft.train.features import FrozenTarget, StateCache
from blockdraft.train.support import check_plain_head

MAX_TOKENS = 700
"""Of a prompt and its answer; longer ones are left out."""
TEXTS_AT_ONCE = 512
"""Answers that are ordered by length together, so that those of a batch are of like length."""
TEXTS_OF_A_BATCH = 16
"""Of a step."""
WEIGHTS = (1.0, 0.8, 0.6)
"""Of the losses one, two and three tokens ahead."""
DROPOUT = 0.1
"""Of features."""
RISE = 0.03
"""Of the run, in which the learning rate rises."""


Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of texts, padded, each place a token from the second on: features before it [texts, places, K *
D], the token [texts, places], the final state there [texts, places, D], and whether the head learns
the target's choice behind it [texts, places], from the last token of the prompt on."""


class Places:
    """The answers as a head reads them."""

    def __init__(
        self,
        target: FrozenTarget,
        examples: Sequence[Example],
        folder: Path,
        target_sha256: str,
    ) -> None:
        """folder: where the target's states are kept; those of others are deleted there."""
        self._examples, self._size = examples, target.hidden_size
        self._cache = StateCache(target, examples, folder, target_sha256)

    def read(self) -> None:
        """Have the target read what the folder lacks."""
        missing = sorted(self._cache.missing(), key=lambda index: len(self._examples[index]))
        for first in range(0, len(missing), TEXTS_AT_ONCE):
            some = missing[first : first + TEXTS_AT_ONCE]
            for start in range(0, len(some), TEXTS_OF_A_BATCH):
                self._states(some[start : start + TEXTS_OF_A_BATCH])
            print(f"{first + len(some)} of {len(missing)} answers read", flush=True)

    def _states(self, indices: Sequence[int]) -> Tensor:
        """[texts, tokens, (K + 1) * D], padded."""
        batch = collate([self._examples[index] for index in indices])
        return self._cache.get([[index] for index in indices], batch)

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        """Each text once, those of a batch of like length."""
        order = torch.randperm(len(self._examples), generator=generator).tolist()
        for first in range(0, len(order), TEXTS_AT_ONCE):
            chosen = sorted(
                order[first : first + TEXTS_AT_ONCE], key=lambda index: len(self._examples[index])
            )
            starts = range(0, len(chosen), TEXTS_OF_A_BATCH)
            for place in torch.randperm(len(starts), generator=generator).tolist():
                yield self._batch(chosen[starts[place] : starts[place] + TEXTS_OF_A_BATCH])

    def _batch(self, indices: Sequence[int]) -> Batch:
        examples, states = [self._examples[index] for index in indices], self._states(indices)
        num_places = states.shape[1] - 1
        tokens = torch.zeros(len(examples), num_places, dtype=torch.long)
        learns = torch.zeros(len(examples), num_places, dtype=torch.bool)
        for row, example in enumerate(examples):
            tokens[row, : len(example) - 1] = torch.tensor(example.token_ids[1:])
            learns[row, len(example.prompt_ids) - 2 : len(example) - 1] = True
        return states[:, :-1, : -self._size], tokens, states[:, 1:, -self._size :], learns


def losses_of(head: HydraHead, batch: Batch, embed_weight: Tensor, lm_head: Tensor) -> list[Tensor]:
    """Cross entropies with the target's distribution over the head's tokens, by tokens ahead."""
    features, tokens, final, learns = batch
    with torch.no_grad():
        expected = torch.softmax((final[learns].to(lm_head.dtype) @ lm_head.T).float(), -1)
    features = torch.nn.functional.dropout(features.float(), DROPOUT)
    found = []
    for hidden in head(features, embed_weight[tokens].float(), len(WEIGHTS)):
        read = hidden[learns].to(lm_head.dtype)
        logits = torch.nn.functional.linear(read, lm_head).float() + head.bias
        found.append(-(expected * torch.log_softmax(logits, -1)).sum(-1).mean())
    return found


def train(
    head: HydraHead, places: Places, target: FrozenTarget, minutes: float, lr: float
) -> list[float]:
    """Train for so long; returns the losses one token ahead."""
    lm_head = target.lm_head_weight[head.token_ids]
    matrices = [own for name, own in head.named_parameters() if name.endswith(".weight")]
    vectors = [own for name, own in head.named_parameters() if not name.endswith(".weight")]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    generator = torch.Generator().manual_seed(0)
    begin, losses = perf_counter(), list[float]()
    while True:
        for batch in places.batches(generator):
            share = (perf_counter() - begin) / (60 * minutes)
            if share >= 1 and losses:
                return losses
            falling = 0.02 + 0.98 * (1 + math.cos(math.pi * min(1.0, share))) / 2
            for group in optimizer.param_groups:
                group["lr"] = lr * falling * min(1.0, 0.02 + share / RISE)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                own = losses_of(head, batch, target.embed_weight, lm_head)
            loss = torch.stack([w * one for w, one in zip(WEIGHTS, own, strict=True)]).sum()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            losses.append(own[0].item())
            if len(losses) % 100 == 0:
                print(f"{len(losses)} steps, loss {sum(losses[-100:]) / 100:.3f}", flush=True)


def new_head(
    target: FrozenTarget, examples: Sequence[Example], num_tokens: int, inner_size: int
) -> HydraHead:
    """That guesses the most frequent tokens of the answers, as often as they are at first."""
    counts = Counter(token for example in examples for token in example.response_ids)
    token_ids = sorted(token for token, _ in counts.most_common(num_tokens))
    torch.manual_seed(0)
    frequent = torch.tensor([counts[token] for token in token_ids]) / counts.total()
    shape = HeadShape(target.hidden_size, inner_size, target.layer_ids, float(frequent.sum()))
    head = HydraHead(shape, torch.tensor(token_ids))
    with torch.no_grad():
        head.bias.copy_(frequent.log())
        head.last_norm.fill_(0.1)  # near no opinion beside the frequencies
    return head


def _some_layers(drafter: Path) -> list[int]:
    """The second, the middle one and the last of those that a DFlash drafter reads.

    Raises:
        ConfigError: it is of another kind, or reads none.
    """
    config = read_config(drafter)
    if not kind_of(config).startswith("dflash"):
        raise ConfigError(f"{drafter} is no DFlash drafter; give --layers, of those that it reads")
    own = DraftConfig.from_dict(config).target_layer_ids
    if not own:
        raise ConfigError(f"{drafter} reads no features of the target; no head can stand beside it")
    return sorted({own[min(1, len(own) - 1)], own[len(own) // 2], own[-1]})


def _known_head(drafter: Path, embed_weight: Tensor) -> HydraHead:
    """The one that the drafter has.

    Raises:
        ConfigError: it has none.
    """
    vocab_size, hidden_size = embed_weight.shape
    head = HydraHead.load(drafter, hidden_size, vocab_size)
    if head is None:
        raise ConfigError(f"{drafter} has no {HEAD_NAME} to go on from; train without --go-on")
    return head.train()


def main() -> None:
    """Read, train and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafter", type=Path, help="folder")
    parser.add_argument("answers", type=Path, nargs="+", help="files or folders of answers")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument(
        "--states",
        type=Path,
        required=True,
        help="folder for what is read; what it holds of others is lost",
    )
    parser.add_argument("--limit", type=int, help="answers to learn from, drawn at random")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--go-on", action="store_true", help="from the head in the folder")
    parser.add_argument("--layers", type=int, nargs="+", help="default: three of the drafter's")
    parser.add_argument("--num-tokens", type=int, help="that are guessed; default: 8192")
    parser.add_argument("--inner-size", type=int, help="default: 1152")
    args = parser.parse_args()
    if args.go_on and (args.layers or args.num_tokens or args.inner_size):
        parser.error("with --go-on the head's own layers, tokens and size stay; leave them out")
    let_torch_use_matrix_registers()
    folder = resolve_model(args.target)
    model = load_target_model(folder, torch.bfloat16, "cpu")
    check_plain_head(model, "training of a Hydra head", "it cannot be trained for this target")
    known = _known_head(args.drafter, model.get_input_embeddings().weight) if args.go_on else None
    layers = known.shape.target_layer_ids if known else args.layers or _some_layers(args.drafter)
    target = FrozenTarget(model, layers)
    examples = [
        example
        for example in read_examples(args.answers, min_response_len=1, max_len=2**30)
        if len(example.token_ids) <= MAX_TOKENS and len(example.prompt_ids) > 1
    ]
    random.Random(7).shuffle(examples)
    examples = examples[: args.limit]
    if not examples:
        raise ConfigError(f"no answer holds at most {MAX_TOKENS} tokens; give shorter ones")
    places = Places(target, examples, args.states, target_sha256(folder))
    places.read()
    head = known or new_head(target, examples, args.num_tokens or 8192, args.inner_size or 1152)
    train(head, places, target, args.minutes, args.lr)
    head.save(args.drafter)


if __name__ == "__main__":
    main()
