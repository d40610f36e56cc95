"""Let a target answer the prompts of given answers once more, thousands at once on a card.

    python tools/sample_answers.py ANSWERS [ANSWERS]... --output FILE.jsonl --seconds 90

For training only: values of a row depend on its neighbors here, unlike in `blockdraft data`, which
takes over a hundred times as long on two cores. Prompts of like length are answered together, each
to its end, in random order of these groups until the seconds are over. Targets are those with the
layers of Llama.
"""

import argparse
import json
import random
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.core.errors import BlockdraftError, ConfigError
from blockdraft.data.dataset import read_examples
from blockdraft.data.shards import files_of
from blockdraft.data.store import Example
from blockdraft.hub.resolve import resolve_model
from blockdraft.models.target.loading import load_target_model, resolve_device
from blockdraft.text.tokenizer import load_tokenizer

MAX_PROMPT = 380
"""Tokens of a prompt; longer ones are left out."""
PREFILL_TEXTS = 256
"""Prompts that are read together."""
COMPACT_STEPS = 16
"""Between looks at how many rows have ended."""
COMPACT_SHARE = 0.8
"""With fewer rows than that still going on, the others are taken out."""
ROOM = 16
"""Steps between the widths of attention."""


@dataclass
class Rows:
    """Texts that are written, a row each.

    keys, values: of each layer [rows, heads, room, head_dim]. lengths: [rows], tokens that these
    hold. newest: [rows], the token behind them. names: [rows], which of the prompts.
    """

    keys: list[Tensor]
    values: list[Tensor]
    lengths: Tensor
    newest: Tensor
    names: Tensor

    def only(self, kept: Tensor) -> "Rows":
        """Some of the rows; the others' memory is given back layer by layer."""
        for layers in (self.keys, self.values):
            for number, layer in enumerate(layers):
                layers[number] = layer[kept]
        return Rows(self.keys, self.values, self.lengths[kept], self.newest[kept], self.names[kept])


class LlamaWriter:
    """The target's own layers, with keys and values that stay where they are."""

    def __init__(self, model: Any) -> None:
        """Raises ConfigError for other layers than Llama's."""
        config = model.config
        is_plain = config.model_type == "llama" and config.hidden_act == "silu"
        is_plain = is_plain and config.rope_parameters["rope_type"] == "default"
        if not is_plain or config.attention_bias or config.mlp_bias:
            raise ConfigError(
                f"{config.model_type} has other layers or rotations than Llama; use blockdraft data"
            )
        self.num_heads, self.num_keys = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        decoder = model.get_decoder()
        self.embedding, self.head = decoder.embed_tokens.weight, model.lm_head.weight
        self.norm, self.layers = decoder.norm.weight, list[dict[str, Tensor]]()
        for layer in decoder.layers:
            heads, mlp = layer.self_attn, layer.mlp
            own = {"norm": layer.input_layernorm.weight, "out": heads.o_proj.weight}
            own["heads"] = torch.cat(
                [one.weight for one in (heads.q_proj, heads.k_proj, heads.v_proj)]
            )
            own |= {"mlp_norm": layer.post_attention_layernorm.weight, "down": mlp.down_proj.weight}
            own["gate_up"] = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            self.layers.append(own)
        self.device = self.embedding.device
        half = torch.arange(0, self.head_dim, 2, device=self.device).float() / self.head_dim
        self.frequencies = config.rope_parameters["rope_theta"] ** -half

    def read(self, prompts: Sequence[Sequence[int]], room: int) -> Rows:
        """Prompts without their last token, which is the newest."""
        shape = len(prompts), self.num_keys, room, self.head_dim
        keys, values = ([self.embedding.new_zeros(shape) for _ in self.layers] for _ in range(2))
        for start in range(0, len(prompts), PREFILL_TEXTS):
            some = prompts[start : start + PREFILL_TEXTS]
            width = max(map(len, some)) - 1
            ids = [[*one[:-1]] + [0] * (width + 1 - len(one)) for one in some]
            x = F.embedding(torch.tensor(ids, device=self.device), self.embedding)
            rotation = self._rotation(torch.arange(width, device=self.device))
            for layer, key, value in zip(self.layers, keys, values, strict=True):
                query, own_key, own_value = self._split(layer, x, rotation)
                # What pads a prompt comes behind it, and later tokens take its place.
                key[start : start + len(some), :, :width] = own_key
                value[start : start + len(some), :, :width] = own_value
                found = F.scaled_dot_product_attention(
                    query, own_key, own_value, is_causal=True, enable_gqa=True
                )
                x = self._finish(layer, x, found.transpose(1, 2).flatten(2))
        device = self.device
        return Rows(
            keys,
            values,
            torch.tensor([len(one) - 1 for one in prompts], device=device),
            torch.tensor([one[-1] for one in prompts], device=device),
            torch.arange(len(prompts), device=device),
        )

    def step(self, rows: Rows, width: int) -> Tensor:
        """Logits [rows, V] behind the newest tokens, which the keys and values then hold.

        width: more tokens than any text has.
        """
        num_rows, number = len(rows.newest), torch.arange(len(rows.newest), device=self.device)
        x = F.embedding(rows.newest[:, None], self.embedding)
        cosines, sines = self._rotation(rows.lengths)
        rotation = cosines[:, None, None], sines[:, None, None]
        places = torch.arange(width, device=self.device)
        unseen = (places > rows.lengths[:, None])[:, None, None]
        for layer, keys, values in zip(self.layers, rows.keys, rows.values, strict=True):
            query, key, value = self._split(layer, x, rotation)
            keys[number, :, rows.lengths] = key[:, :, 0]
            values[number, :, rows.lengths] = value[:, :, 0]
            grouped = query.view(num_rows, self.num_keys, -1, self.head_dim)
            scores = grouped @ keys[:, :, :width].transpose(2, 3) * self.head_dim**-0.5
            shares = torch.softmax(scores.masked_fill_(unseen, -torch.inf), -1)
            found = shares @ values[:, :, :width]
            x = self._finish(layer, x, found.reshape(num_rows, 1, -1))
        return F.linear(F.rms_norm(x[:, 0], self.norm.shape, self.norm, self.eps), self.head)

    def _rotation(self, places: Tensor) -> tuple[Tensor, Tensor]:
        angles = places.float()[:, None] * self.frequencies
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(self.embedding.dtype), angles.sin().to(self.embedding.dtype)

    def _split(
        self, layer: dict[str, Tensor], x: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [texts, heads, places, head_dim]."""
        normed = F.rms_norm(x, layer["norm"].shape, layer["norm"], self.eps)
        heads = F.linear(normed, layer["heads"])
        heads = heads.view(*heads.shape[:2], -1, self.head_dim).transpose(1, 2)
        turned, value = torch.split(heads, [self.num_heads + self.num_keys, self.num_keys], 1)
        first, second = turned.chunk(2, -1)
        turned = turned * rotation[0] + torch.cat((-second, first), -1) * rotation[1]
        query, key = torch.split(turned, [self.num_heads, self.num_keys], 1)
        return query, key, value

    def _finish(self, layer: dict[str, Tensor], x: Tensor, found: Tensor) -> Tensor:
        x = x + F.linear(found, layer["out"])
        normed = F.rms_norm(x, layer["mlp_norm"].shape, layer["mlp_norm"], self.eps)
        gates, gated = F.linear(normed, layer["gate_up"]).chunk(2, -1)
        return x + F.linear(F.silu(gates) * gated, layer["down"])


@torch.inference_mode()
def write(
    writer: LlamaWriter,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    max_tokens: int,
    eos_ids: Set[int],
) -> list[list[int]]:
    """An answer to each prompt, with its end token if one came."""
    ends, end = torch.tensor(sorted(eos_ids), device=writer.device), min(eos_ids)
    longest = max(map(len, prompts))
    rows = writer.read(prompts, longest + max_tokens)
    tokens = torch.full((len(prompts), max_tokens), end, device=writer.device)
    is_over = torch.zeros(len(prompts), dtype=torch.bool, device=writer.device)
    for step in range(max_tokens):
        if step % COMPACT_STEPS == 0 and step:
            kept = (~is_over).nonzero()[:, 0]
            if not len(kept):
                break
            if len(kept) < COMPACT_SHARE * len(is_over):
                rows, is_over = rows.only(kept), is_over[kept]
        width = min(-(-(longest + step) // ROOM) * ROOM, longest + max_tokens)
        logits = writer.step(rows, width).float()
        if temperature:
            noise = torch.empty_like(logits).exponential_()
            chosen = (logits / temperature - noise.log_()).argmax(-1)
        else:
            chosen = logits.argmax(-1)
        chosen = chosen.masked_fill(is_over, end)
        tokens[rows.names, step] = chosen
        is_over |= torch.isin(chosen, ends)
        rows.lengths, rows.newest = rows.lengths + 1, chosen
    return [_until(one, eos_ids) for one in tokens.tolist()]


def _until(answer: list[int], eos_ids: Set[int]) -> list[int]:
    first = next((place for place, token in enumerate(answer) if token in eos_ids), len(answer))
    return answer[: first + 1]


def groups(prompts: Sequence[Example], token_room: int, max_tokens: int) -> list[list[Example]]:
    """Of like length, each with room for its answers, in random order."""
    found: list[list[Example]] = [[]]
    for prompt in sorted(prompts, key=lambda own: len(own.prompt_ids)):
        room = (len(found[-1]) + 1) * (len(prompt.prompt_ids) + max_tokens)
        if found[-1] and room > token_room:
            found.append([])
        found[-1].append(prompt)
    random.Random(1).shuffle(found)
    return found


def _prompts(paths: Sequence[Path]) -> list[Example]:
    """Each once."""
    texts = read_examples(paths, min_response_len=1, max_len=None)
    chosen: dict[tuple[int, ...], Example] = {}
    for text in texts.where((texts.prompt_lens <= MAX_PROMPT) & (texts.prompt_lens > 1)):
        chosen.setdefault(text.prompt_ids, text)
    return list(chosen.values())


def main() -> None:
    """Answer until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answers", type=Path, nargs="+", help="whose prompts are answered")
    parser.add_argument("--output", type=Path, required=True, help="file of the answers, anew")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--device", default="auto", help="auto (a card if there is one) or another")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[1.0], help="of each round"
    )
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--token-room", type=int, default=1_500_000, help="tokens kept at once")
    parser.add_argument("--seconds", type=float, default=3600.0)
    args = parser.parse_args()
    read = [file.resolve() for path in args.answers for file in files_of(path)]
    if args.output.resolve() in read:
        raise ConfigError(
            f"--output {args.output} is one of the files of answers, which it would replace; "
            "give another"
        )
    torch.manual_seed(1)
    folder, device = resolve_model(args.target), resolve_device(args.device)
    model: Any = load_target_model(folder, torch.bfloat16, device)
    writer, eos_ids = LlamaWriter(model), load_tokenizer(folder).eos_ids
    prompts = _prompts(args.answers)
    if not prompts:
        raise ConfigError(f"no prompt holds 2 to {MAX_PROMPT} tokens; give other answers")
    found = groups(prompts, args.token_room, args.max_tokens)
    begin, num_tokens = perf_counter(), 0
    with args.output.open("w", encoding="utf-8") as file:
        for (number, temperature), group in product(enumerate(args.temperatures), found):
            if perf_counter() - begin > args.seconds:
                break
            texts = [own.prompt_ids for own in group]
            answers = write(writer, texts, temperature, args.max_tokens, eos_ids)
            for own, answer in zip(group, answers, strict=True):
                row: dict[str, Any] = {"id": own.id, "set": own.set, "prompt_ids": own.prompt_ids}
                row |= {"max_tokens": args.max_tokens, "temperature": temperature}
                row |= {"sample": number + 1, "response_ids": answer}
                row["finish"] = "stop" if answer[-1] in eos_ids else "length"
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
            num_tokens += sum(map(len, answers))
            seconds = perf_counter() - begin
            print(f"{num_tokens} tokens in {seconds:.1f} s, {len(group)} rows", flush=True)


if __name__ == "__main__":
    try:
        main()
    except BlockdraftError as error:
        raise SystemExit(f"{Path(__file__).name}: {error}") from error
