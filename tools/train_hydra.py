"""Train a Hydra head for a drafter that exists, on answers of its target.

    python tools/train_hydra.py DRAFTER ANSWERS [ANSWERS]... --states FOLDER --minutes 60

    python tools/train_hydra.py DRAFTER ANSWERS [ANSWERS]... --device cuda --minutes 8

Writes hydra_head.safetensors into the drafter's folder. The target reads the answers: the outputs
of three of the layers that the drafter reads, and its final states. With --states it does so once,
before the training: they are kept in that folder, 4.6 KB a token with a hidden size of 576, and an
interrupted run goes on where it was. Without --states it reads them again in each step, which is
the faster way on a card.
The head learns, at each place of the answers, the target's distribution over the most frequent
tokens: with the features before that place, and with its own states in place of the last ones. It
begins anew, or with --go-on from the head that the drafter has.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from blockdraft.core.errors import BlockdraftError, ConfigError
from blockdraft.core.libraries import let_torch_use_matrix_registers
from blockdraft.data.dataset import collate, count_answer_tokens, read_examples, split_held_out
from blockdraft.data.identity import target_sha256
from blockdraft.data.store import Example, TextStore
from blockdraft.hub.resolve import resolve_model
from blockdraft.models.draft.checkpoint import read_config
from blockdraft.models.draft.config import DraftConfig
from blockdraft.models.draft.hydra_head import HEAD_NAME, HeadShape, HydraHead
from blockdraft.models.target.loading import load_target_model, resolve_device
from blockdraft.speculate.drafters.kinds import kind_of
from blockdraft.train.features import FrozenTarget, StateCache
from blockdraft.train.support import check_plain_head

MAX_TOKENS = 700
"""Of a prompt and its answer; longer ones are left out."""
TEXTS_AT_ONCE = 512
"""Answers that are ordered by length together, so that those of a batch are of like length."""
STEP_TOKENS = 4096
"""Of the texts of a step, with what pads them to one length."""
WEIGHTS = (1.0, 0.8, 0.6)
"""Of the losses one, two and three tokens ahead."""
DROPOUT = 0.1
"""Of features."""
RISE = 0.03
"""Of the run, in which the learning rate rises."""
HELD_OUT_SHARE = 0.005
"""Of the prompts, whose answers are not trained on."""


Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of texts, padded, each place a token from the second on: features before it [texts, places, K *
D], the token [texts, places], the final state there [texts, places, D], and the places, of all
texts one behind another, where the head learns the target's choice: from the last token of the
prompt on."""


class Places:
    """The answers as a head reads them."""

    def __init__(
        self,
        target: FrozenTarget,
        examples: Sequence[Example],
        folder: Path | None,
        target_sha256: str,
        step_tokens: int = STEP_TOKENS,
    ) -> None:
        """folder: where the target's states are kept; those of others are deleted there."""
        self._examples, self._target, self._step_tokens = examples, target, step_tokens
        self._lengths: list[int] = TextStore.of(examples).lengths.tolist()
        self._cache = StateCache(target, examples, folder, target_sha256)

    def __len__(self) -> int:
        return len(self._examples)

    def read(self) -> None:
        """Have the target read what the folder lacks."""
        missing = sorted(self._cache.missing(), key=self._lengths.__getitem__)
        for first in range(0, len(missing), TEXTS_AT_ONCE):
            some = missing[first : first + TEXTS_AT_ONCE]
            for indices in self._alike(some):
                self._states(indices)
            print(f"{first + len(some)} of {len(missing)} answers read", flush=True)

    def _alike(self, rising: Sequence[int]) -> list[list[int]]:
        """Texts of rising length, as many together as a step takes."""
        batches: list[list[int]] = []
        for index in rising:
            if not batches or (len(batches[-1]) + 1) * self._lengths[index] > self._step_tokens:
                batches.append([])
            batches[-1].append(index)
        return batches

    def _states(self, indices: Sequence[int]) -> Tensor:
        """[texts, tokens, (K + 1) * D], padded."""
        device = self._target.embed_weight.device
        batch = collate([self._examples[index] for index in indices], device)
        return self._cache.get([[index] for index in indices], batch)

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        """Each text once, those of a batch of like length."""
        order = torch.randperm(len(self._examples), generator=generator).tolist()
        for first in range(0, len(order), TEXTS_AT_ONCE):
            some = order[first : first + TEXTS_AT_ONCE]
            alike = self._alike(sorted(some, key=self._lengths.__getitem__))
            for place in torch.randperm(len(alike), generator=generator).tolist():
                yield self._batch(alike[place])

    def _batch(self, indices: Sequence[int]) -> Batch:
        examples, states = [self._examples[index] for index in indices], self._states(indices)
        num_places, size = states.shape[1] - 1, self._target.hidden_size
        tokens = torch.zeros(len(examples), num_places, dtype=torch.long)
        learns = torch.zeros(len(examples), num_places, dtype=torch.bool)
        for row, example in enumerate(examples):
            tokens[row, : len(example) - 1] = torch.tensor(example.token_ids[1:])
            learns[row, len(example.prompt_ids) - 2 : len(example) - 1] = True
        # The places as numbers: with booleans a card would have to say how many there are.
        places = learns.flatten().nonzero()[:, 0].to(states.device)
        tokens = tokens.to(states.device)
        return states[:, :-1, :-size], tokens, states[:, 1:, -size:], places


def losses_of(head: HydraHead, batch: Batch, embed_weight: Tensor, lm_head: Tensor) -> list[Tensor]:
    """Divergences from the target's distribution over the head's tokens, by tokens ahead.

    Kullback-Leibler, in nats, a mean over the places.
    """
    features, tokens, final, places = batch
    with torch.no_grad():
        logits = final.flatten(0, 1)[places].to(lm_head.dtype) @ lm_head.T
        known = torch.log_softmax(logits.float(), -1)
    if head.training:
        features = torch.nn.functional.dropout(features.float(), DROPOUT)
    found = []
    for hidden in head(features.float(), embed_weight[tokens].float(), len(WEIGHTS)):
        read = hidden.flatten(0, 1)[places].to(lm_head.dtype)
        logits = torch.nn.functional.linear(read, lm_head).float() + head.bias
        guessed = torch.log_softmax(logits, -1)
        found.append((known.exp() * (known - guessed)).sum(-1).mean())
    return found


@torch.no_grad()
def divergences(head: HydraHead, places: Places, target: FrozenTarget) -> list[float]:
    """Of texts that the head has not seen, by tokens ahead."""
    lm_head, rows = target.lm_head_weight[head.token_ids], list[Tensor]()
    head.eval()
    for batch in places.batches(torch.Generator()):
        own = losses_of(head, batch, target.embed_weight, lm_head)
        rows.append(torch.stack([*own, own[0].new_ones(())]) * len(batch[-1]))
    head.train()
    *sums, number = torch.stack(rows).sum(0).tolist()
    return [one / number for one in sums]


def train(
    head: HydraHead, places: Places, target: FrozenTarget, minutes: float, lr: float
) -> list[float]:
    """Train for so long; returns the losses one token ahead."""
    lm_head, device = target.lm_head_weight[head.token_ids], target.embed_weight.device
    matrices = [own for name, own in head.named_parameters() if name.endswith(".weight")]
    vectors = [own for name, own in head.named_parameters() if not name.endswith(".weight")]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )
    generator = torch.Generator().manual_seed(0)
    begin, losses, num_places = perf_counter(), list[Tensor](), 0
    while True:
        for batch in places.batches(generator):
            share = (perf_counter() - begin) / (60 * minutes)
            if share >= 1 and losses:
                return torch.stack(losses).tolist()
            falling = 0.02 + 0.98 * (1 + math.cos(math.pi * min(1.0, share))) / 2
            for group in optimizer.param_groups:
                group["lr"] = lr * falling * min(1.0, 0.02 + share / RISE)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                own = losses_of(head, batch, target.embed_weight, lm_head)
            loss = torch.stack([w * one for w, one in zip(WEIGHTS, own, strict=True)]).sum()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            losses.append(own[0].detach())
            num_places += len(batch[-1])
            if len(losses) % 100 == 0:
                recent = float(torch.stack(losses[-100:]).mean())
                print(f"{len(losses)} steps, {num_places} places, loss {recent:.3f}", flush=True)


def new_head(
    target: FrozenTarget, examples: Sequence[Example], num_tokens: int, inner_size: int
) -> HydraHead:
    """That guesses the most frequent tokens of the answers, as often as they are at first."""
    counts = count_answer_tokens(examples)
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
        "--states", type=Path, help="folder for what is read; what it holds of others is lost"
    )
    parser.add_argument("--device", default="cpu", help="cpu, or a torch device such as cuda")
    parser.add_argument(
        "--step-tokens", type=int, default=STEP_TOKENS, help="of a step; for a card 32768"
    )
    parser.add_argument(
        "--limit", type=int, help="answers to take, drawn at random; 0.5 %% of prompts are held out"
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--go-on", action="store_true", help="from the head in the folder")
    parser.add_argument("--layers", type=int, nargs="+", help="default: three of the drafter's")
    parser.add_argument("--num-tokens", type=int, help="that are guessed; default: 8192")
    parser.add_argument("--inner-size", type=int, help="default: 1152")
    args = parser.parse_args()
    if args.go_on and (args.layers or args.num_tokens or args.inner_size):
        parser.error("with --go-on the head's own layers, tokens and size stay; leave them out")
    read_config(args.drafter)  # not after an hour, when the head is written there
    let_torch_use_matrix_registers()
    folder = resolve_model(args.target)
    device = resolve_device(args.device)
    model = load_target_model(folder, torch.bfloat16, device)
    check_plain_head(model, "training of a Hydra head", "it cannot be trained for this target")
    known = _known_head(args.drafter, model.get_input_embeddings().weight) if args.go_on else None
    layers = known.shape.target_layer_ids if known else args.layers or _some_layers(args.drafter)
    target = FrozenTarget(model, layers)
    texts = read_examples(args.answers, min_response_len=1, max_len=2**30)
    texts = texts.where((texts.lengths <= MAX_TOKENS) & (texts.prompt_lens > 1))
    drawn = np.random.default_rng(7).permutation(texts.chosen)[: args.limit]
    examples, held_out = split_held_out(TextStore(texts.arrays, drawn), HELD_OUT_SHARE)
    if not examples:
        raise ConfigError(
            f"no answer is left to train on ({len(held_out)} held out; of at most {MAX_TOKENS} "
            "tokens, prompts of two or more); give others"
        )
    sha256 = target_sha256(folder)
    others = Places(target, held_out, None, sha256, args.step_tokens)
    places = Places(target, examples, args.states, sha256, args.step_tokens)
    if args.states:
        places.read()
    head = known or new_head(target, examples, args.num_tokens or 8192, args.inner_size or 1152)
    head.to(device)
    _tell("before", head, others, target)
    train(head, places, target, args.minutes, args.lr)
    _tell("after", head, others, target)
    head.cpu().save(args.drafter)


def _tell(when: str, head: HydraHead, held_out: Places, target: FrozenTarget) -> None:
    if len(held_out):
        found = ", ".join(f"{one:.3f}" for one in divergences(head, held_out, target))
        print(f"{when}: divergence in nats on {len(held_out)} held-out answers: {found}")


if __name__ == "__main__":
    try:
        main()
    except BlockdraftError as error:
        raise SystemExit(f"{Path(__file__).name}: {error}") from error
