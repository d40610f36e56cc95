"""Train a Hydra head for a drafter that exists, on answers of its target.

    python tools/train_hydra.py DRAFTER ANSWERS [ANSWERS]... --states FOLDER --minutes 60

Writes hydra_head.safetensors into the drafter's folder. First the target reads the answers: the
outputs of two of the layers that the drafter reads, and its final states, are kept in --states, 3.5
KB a token with a hidden size of 576. An interrupted run goes on behind the last part. Then the head
learns, at each place of the answers, the target's distribution over the most frequent tokens.
"""

import argparse
import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from blockdraft.core.errors import ConfigError
from blockdraft.data.dataset import read_examples
from blockdraft.data.store import Example
from blockdraft.hub.resolve import resolve_model
from blockdraft.models.checkpoint import read_config
from blockdraft.models.draft_config import DraftConfig
from blockdraft.models.hydra_head import HeadShape, HydraHead, read
from blockdraft.models.loading import load_target_model
from blockdraft.speculate.drafters.kinds import kind_of
from blockdraft.train.features import FrozenTarget
from blockdraft.train.support import check_plain_head

MAX_TOKENS = 700
"""Of a prompt and its answer; longer ones are left out."""
PART = 400
"""Answers of a file of states."""
BATCH = 1024
"""Places of a step."""
PARTS_AT_ONCE = 4
"""Files whose places are shuffled together."""
DROPOUT = 0.1
"""Of features."""
RISE = 0.03
"""Of the run, in which the learning rate rises."""


def write_states(target: FrozenTarget, examples: Sequence[Example], folder: Path) -> list[Path]:
    """Read what is not read yet; a file for each part of the answers.

    Raises:
        ConfigError: the folder holds states of other answers or layers, or there are no answers.

    Of an answer the states [tokens + 1, (K + 1) * D] from the last prompt token but one on, and the
    tokens from the last of the prompt on.
    """
    if not examples:
        raise ConfigError(f"no answer holds at most {MAX_TOKENS} tokens; give shorter ones")
    folder.mkdir(parents=True, exist_ok=True)
    key, said = folder / "key.json", _key(target, examples)
    if key.exists() and key.read_text(encoding="utf-8") != said:
        raise ConfigError(f"{folder} holds states of other answers or layers; give another folder")
    key.write_text(said, encoding="utf-8")
    paths = []
    for start in range(0, len(examples), PART):
        path = folder / f"{start:07d}.pt"
        paths.append(path)
        if path.exists():
            continue
        states, tokens = [], []
        for example in examples[start : start + PART]:
            found = target.states(torch.tensor([example.token_ids]))[0]
            first = len(example.prompt_ids) - 1
            # Behind a place come the token there and the one that is to be guessed.
            states.append(found[first - 1 :].bfloat16().clone())
            tokens.append(torch.tensor(example.token_ids[first:]))
        part = path.with_suffix(".part")
        torch.save({"states": states, "tokens": tokens}, part)
        part.replace(path)
        print(f"{start + len(states)} of {len(examples)} answers read", flush=True)
    return paths


def _key(target: FrozenTarget, examples: Sequence[Example]) -> str:
    """Names the target's embedding, the layers and the answers."""
    digest = hashlib.sha256(target.embed_weight[:100].detach().float().numpy().tobytes())
    for example in examples:
        digest.update(repr((example.prompt_ids, example.response_ids)).encode())
    return json.dumps({"layers": target.layer_ids, "digest": digest.hexdigest()})


def places(
    paths: Sequence[Path], size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, ...]]:
    """Features [BATCH, K * D], the tokens behind them and the final states [BATCH, D] there."""
    order = torch.randperm(len(paths), generator=generator).tolist()
    for first in range(0, len(order), PARTS_AT_ONCE):
        features, tokens, final = [], [], []
        for index in order[first : first + PARTS_AT_ONCE]:
            part = torch.load(paths[index])
            for states, own in zip(part["states"], part["tokens"], strict=True):
                features.append(states[:-1, :-size])
                tokens.append(own)
                final.append(states[1:, -size:])
        joined = torch.cat(features), torch.cat(tokens), torch.cat(final)
        for chosen in torch.split(torch.randperm(len(joined[1]), generator=generator), BATCH):
            yield tuple(tensor[chosen] for tensor in joined)


def loss_of(
    head: HydraHead, batch: tuple[Tensor, ...], embed_weight: Tensor, lm_head: Tensor
) -> Tensor:
    """Cross entropy with the target's distribution over the head's tokens."""
    features, tokens, final = batch
    with torch.no_grad():
        expected = torch.softmax((final.to(lm_head.dtype) @ lm_head.T).float(), -1)
    features = torch.nn.functional.dropout(features.float(), DROPOUT)
    hidden = read(head, features, embed_weight[tokens].float())
    logits = torch.nn.functional.linear(hidden.to(lm_head.dtype), lm_head).float() + head.bias
    return -(expected * torch.log_softmax(logits, -1)).sum(-1).mean()


def train(
    head: HydraHead, paths: Sequence[Path], target: FrozenTarget, minutes: float, lr: float
) -> list[float]:
    """Train for so long; returns the losses."""
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
        for batch in places(paths, target.hidden_size, generator):
            share = (perf_counter() - begin) / (60 * minutes)
            if share >= 1 and losses:
                return losses
            falling = 0.02 + 0.98 * (1 + math.cos(math.pi * min(1.0, share))) / 2
            for group in optimizer.param_groups:
                group["lr"] = lr * falling * min(1.0, 0.02 + share / RISE)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(head, batch, target.embed_weight, lm_head)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
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


def _two_layers(drafter: Path) -> list[int]:
    """A middle one and the last of those that a DFlash drafter reads.

    Raises:
        ConfigError: it is of another kind, or reads none.
    """
    config = read_config(drafter)
    if not kind_of(config).startswith("dflash"):
        raise ConfigError(f"{drafter} is no DFlash drafter; give --layers, of those that it reads")
    own = DraftConfig.from_dict(config).target_layer_ids
    if not own:
        raise ConfigError(f"{drafter} reads no features of the target; no head can stand beside it")
    return [own[len(own) // 2], own[-1]]


def main() -> None:
    """Read, train and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafter", type=Path, help="folder")
    parser.add_argument("answers", type=Path, nargs="+", help="files or folders of answers")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--states", type=Path, required=True, help="folder for what is read")
    parser.add_argument("--limit", type=int, help="answers to learn from, drawn at random")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--layers", type=int, nargs="+", help="default: two of the drafter's")
    parser.add_argument("--num-tokens", type=int, default=8192, help="that are guessed")
    parser.add_argument("--inner-size", type=int, default=1152)
    args = parser.parse_args()
    layers = args.layers or _two_layers(args.drafter)
    model = load_target_model(resolve_model(args.target), torch.bfloat16, "cpu")
    check_plain_head(model, "training of a Hydra head", "it cannot be trained for this target")
    target = FrozenTarget(model, layers)
    examples = [
        example
        for example in read_examples(args.answers, min_response_len=1, max_len=2**30)
        if len(example.token_ids) <= MAX_TOKENS and len(example.prompt_ids) > 1
    ]
    random.Random(7).shuffle(examples)
    examples = examples[: args.limit]
    paths = write_states(target, examples, args.states)
    head = new_head(target, examples, args.num_tokens, args.inner_size)
    train(head, paths, target, args.minutes, args.lr)
    head.save(args.drafter)


if __name__ == "__main__":
    main()
