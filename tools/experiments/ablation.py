"""What each choice of the trainer is worth: arms of equal time on the default target.

    python tools/experiments/ablation.py [--minutes 10] [--answers 1500] [--out runs/ablation]
        [--arms base,block-16] [--only features|training|measuring] [--prompts FILE]...

Every arm is the base with one thing changed. All train on the same answers from features that are
computed once, so that minutes go into the drafter. On a CPU an arm has one thread, and its minutes
are those in which that thread computed: other work on the machine takes little from its budget (it
shares the memory), and arms may be trained side by side (`--only features` first, then
`--only training` with other `--arms` in each process, `--only measuring` on an idle machine).
Measured outside of the minutes: the acceptance length offline on held-out answers, and acceptance
length and speed-up of real greedy decoding with whole blocks, on the prompts of held-out answers or
on those of the files given. What is done is not done again, and an arm that was broken off goes on;
the table of all measured arms is printed at the end. The arm input-fusion is measured offline only:
its contexts depend on all that came before, and no engine decodes so.
"""

import argparse
import dataclasses
import json
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from blockdraft.core.files import write_whole
from blockdraft.data.dataset import collate, read_examples
from blockdraft.data.identity import target_sha256
from blockdraft.data.store import Example
from blockdraft.hub.resolve import resolve_model
from blockdraft.measure.provenance import describe_environment
from blockdraft.models.draft.context import LayerKV
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.target.loading import load_target_model, resolve_device, resolve_dtype
from blockdraft.train.config import TrainConfig
from blockdraft.train.drafter import feature_layers
from blockdraft.train.evaluate import HeldOut
from blockdraft.train.features import FeatureCache, FrozenTarget
from blockdraft.train.kinds.block import BlockDrafter
from blockdraft.train.prepare import NUM_FEATURES, read_data
from blockdraft.train.run_folder import LAST
from blockdraft.train.trainer import train
from blockdraft.train.true_tau import TrueTau, real_decoding

RECIPE = Path("recipes/smollm2-135m")
ARMS: Mapping[str, Mapping[str, Any]] = {
    "base": {},
    "layers-1": {"num_layers": 1},
    "layers-3": {"num_layers": 3},
    "block-16": {"block_size": 16},
    "features-1": {"num_features": 1},
    "features-3": {"num_features": 3},
    "decay": {"position_weights": "decay"},
    "cross-entropy": {"distill_share": 0.0},
    "distillation": {"distill_share": 1.0},
    "adamw": {"optimizer": "adamw"},
    "adamw-lr-1e-3": {"optimizer": "adamw", "lr": 1e-3},
    "adamw-lr-6e-4": {"optimizer": "adamw", "lr": 6e-4},
    "from-target": {"init": "target"},
    "input-fusion": {},
}
"""The base has 5 layers, blocks of 8, 5 features, D-PACE, half distillation, Muon, random weights.
"""
FEATURE_BATCH = 16
TRAINED, RESULT = "trained.json", "result.json"


class InputFusion(DraftModel):
    """The target's features enter as inputs of the first layer, as in EAGLE (arXiv 2503.01840).

    The same weights and blocks; but the context runs through the layers, causally, and each layer
    reads its own states of it instead of the features themselves. Rows hold one text each.
    """

    def project_context(self, features: Tensor, positions: Tensor) -> list[LayerKV]:
        """See `DraftModel.project_context`; needs the context from its first token on."""
        x, rotation = self.context_inputs(features, positions)
        seen, num_tokens = _Seen(), x.shape[1]
        mask = x.new_full((num_tokens, num_tokens), float("-inf")).triu(1)[None, None]
        *earlier, last = self.draft_layers()
        for index, layer in enumerate(earlier):
            x = layer(x, rotation, seen, index, mask, num_tokens)
        # Of the last one nothing else is read.
        seen.extend(len(earlier), *last.context_keys_values(last.input_layernorm(x), rotation))
        return seen.context_kv


class _Seen:
    """Keeps what each layer computes of a stream that has nothing before it."""

    num_context = 0

    def __init__(self) -> None:
        self.context_kv: list[LayerKV] = []

    def extend(self, layer: int, k: Tensor, v: Tensor) -> LayerKV:
        """See `ContextKV.extend`."""
        self.context_kv.append((k, v))
        return k, v


def draft_class(name: str) -> type[DraftModel]:
    """The kind of drafter that an arm trains."""
    return InputFusion if name == "input-fusion" else DraftModel


def base_config(args: argparse.Namespace) -> TrainConfig:
    """What all arms share. Small batches: in minutes, steps count more than their size."""
    device = resolve_device(args.device)
    return TrainConfig(
        target=resolve_model("smollm2-135m"),
        data=(args.out / "answers.jsonl",),
        out=args.out,
        held_out_share=0.06,
        max_len=512,
        batch_sequences=16,
        num_anchors=32,
        max_minutes=args.minutes,
        warmup_steps=10,
        ema_decay=0.95,
        # Measured after the arm instead: what is left here costs a second or two.
        eval_sequences=1,
        eval_minutes=1e6,
        tau_limit=0,
        save_minutes=1.0,
        device=device,
        threads=1 if device == "cpu" else None,
    )


def arm_config(base: TrainConfig, name: str) -> TrainConfig:
    """The base with one thing changed."""
    config = dataclasses.replace(base, out=base.out / name, **ARMS[name])
    return dataclasses.replace(config, feature_cache=_cache_folder(base, num_features(config)))


def num_features(config: TrainConfig) -> int:
    """How many layers of the target an arm reads."""
    return config.num_features or NUM_FEATURES


def _cache_folder(base: TrainConfig, number: int) -> Path:
    return base.out / f"cache-of-{number}-features"  # an arm is called features-1


def keep_settings(args: argparse.Namespace) -> None:
    """Refuse a folder whose arms were made otherwise."""
    settings = {"minutes": args.minutes, "answers": args.answers, "device": args.device}
    settings["clock"] = "computing" if args.device == "cpu" else "wall"
    path = args.out / "settings.json"
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) != settings:
        raise SystemExit(f"{path} is of arms made otherwise; give these settings or another --out")
    args.out.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(settings))


def write_answers(path: Path, number: int) -> None:
    """About that many of the recipe's answers, taken evenly.

    Short ones first, since the first held-out one is all that a run looks at before its first step.
    """
    if path.exists():
        return
    files = sorted(RECIPE.glob("answers-*.jsonl.gz"))
    examples = read_examples(files, min_response_len=8, max_len=512)
    chosen = sorted(examples[:: max(1, len(examples) // number)], key=len)
    lines = [json.dumps(dataclasses.asdict(example)) + "\n" for example in chosen]
    write_whole(path, "".join(lines))


def fill_features(base: TrainConfig, arms: Iterable[str]) -> None:
    """Compute what the arms read of the target, all of it in one forward a text."""
    configs = [arm_config(base, name) for name in arms]
    sha256 = target_sha256(base.target)
    examples, _ = read_data(base)
    dtype = resolve_dtype(base.dtype, base.device)
    model = load_target_model(base.target, dtype, base.device)
    num_layers = model.config.num_hidden_layers
    numbers = {num_features(config) for config in configs}
    ids = {number: feature_layers(num_layers, number) for number in numbers}
    every = tuple(sorted({index for some in ids.values() for index in some}))
    caches = {
        number: FeatureCache(
            FrozenTarget(model, some), examples, _cache_folder(base, number), sha256
        )
        for number, some in ids.items()
    }
    whole = FrozenTarget(model, every)
    todo = sorted({i for c in caches.values() for i in c.missing()}, key=lambda i: len(examples[i]))
    for start in range(0, len(todo), FEATURE_BATCH):
        part = todo[start : start + FEATURE_BATCH]
        states = whole.states(collate([examples[i] for i in part], base.device).token_ids)
        by_layer = dict(
            zip((*every, None), torch.split(states, whole.hidden_size, -1), strict=True)
        )
        for number, cache in caches.items():
            wanted = torch.cat([by_layer[index] for index in (*ids[number], None)], dim=-1)
            for row, index in enumerate(part):
                cache.put(index, wanted[row, : len(examples[index])])
        print(f"features of {start + len(part)} of {len(todo)} answers", flush=True)


def train_arm(base: TrainConfig, name: str) -> None:
    """Train one arm."""
    config = arm_config(base, name)
    print(f"arm {name}", flush=True)
    clock = time.process_time if config.device == "cpu" else time.monotonic
    with (
        patch("blockdraft.train.run_state.monotonic", clock),
        patch("blockdraft.train.prepare.DraftModel", draft_class(name)),
    ):
        result = train(config)
    last = result.evaluations[-1]
    row = {
        **describe_environment(),
        "changes": dict(ARMS[name]),
        "steps": result.num_steps,
        "minutes": last["minutes"],
        "sequences": last["sequences"],
        "tokens": last["tokens"],
    }
    write_whole(config.out / TRAINED, json.dumps(row, indent=1) + "\n")
    # What a finished arm would go on from; a few of them fill a disk.
    shutil.rmtree(config.out / "drafter")
    (config.out / "state.pt").unlink()


def measure_arm(base: TrainConfig, name: str, args: argparse.Namespace) -> None:
    """Measure one trained arm, unless that is done."""
    config = arm_config(base, name)
    path = config.out / RESULT
    if path.exists():
        return
    if not (config.out / TRAINED).exists():
        raise SystemExit(f"arm {name} is not trained yet; run it with --only training first")
    _, held_out = read_data(config)
    trained = draft_class(name).from_pretrained(
        config.out / LAST, resolve_dtype(config.dtype, config.device), config.device
    )
    row = {
        **json.loads((config.out / TRAINED).read_text(encoding="utf-8")),
        "parameters": sum(p.numel() for p in trained.parameters()),
        **measure(config, trained, held_out, args),
    }
    write_whole(path, json.dumps(row, indent=1) + "\n")


def measure(
    config: TrainConfig, drafter: DraftModel, held_out: Sequence[Example], args: argparse.Namespace
) -> dict[str, Any]:
    """Offline and in real decoding."""
    config = dataclasses.replace(
        config,
        tau_prompts=tuple(args.prompts),
        tau_limit=args.tau_limit,
        tau_max_tokens=args.tau_max_tokens,
    )
    dtype = resolve_dtype(config.dtype, config.device)
    model = load_target_model(config.target, dtype, config.device)
    real = TrueTau(tau={}, speedup={})
    if not isinstance(drafter, InputFusion):
        real = real_decoding(config, model, held_out).measure(drafter, lambda: None)
    target = FrozenTarget(model, drafter.config.target_layer_ids)
    offline = HeldOut(target, held_out, args.eval_sequences).evaluate(BlockDrafter(drafter))
    return {
        "offline": dataclasses.asdict(offline),
        "true_tau": dict(real.tau),
        "speedup": dict(real.speedup),
    }


def table(out: Path) -> str:
    """All measured arms, as Markdown."""
    heads = (
        *("arm", "M parameters", "steps", "texts seen", "offline tau"),
        *("true tau", "without loops", "speed-up"),
    )
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    for name in ARMS:
        if (out / name / RESULT).exists():
            row = json.loads((out / name / RESULT).read_text(encoding="utf-8"))
            cells = (
                name,
                f"{row['parameters'] / 1e6:.1f}",
                str(row["steps"]),
                str(row["sequences"]),
                f"{row['offline']['tau']:.3f}",
                _cell(row["true_tau"], "all", 3),
                _cell(row["true_tau"], "all without loops", 3),
                _cell(row["speedup"], "all", 2),
            )
            lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def _cell(figures: Mapping[str, float], name: str, digits: int) -> str:
    return f"{figures[name]:.{digits}f}" if name in figures else ""


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of training, for each arm")
    parser.add_argument("--answers", type=int, default=1500)
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--arms", default=",".join(ARMS), help="with commas, or all of them")
    parser.add_argument("--only", choices=("features", "training", "measuring"))
    parser.add_argument("--prompts", type=Path, action="append", default=[])
    parser.add_argument("--tau-limit", type=int, default=2, help="prompts of each set")
    parser.add_argument("--tau-max-tokens", type=int, default=64)
    parser.add_argument("--eval-sequences", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    arms = args.arms.split(",")
    if unknown := [name for name in arms if name not in ARMS]:
        parser.error(f"arm {unknown[0]!r} is unknown; known are {', '.join(ARMS)}")
    keep_settings(args)
    write_answers(args.out / "answers.jsonl", args.answers)
    base = base_config(args)
    left = [name for name in arms if not (args.out / name / TRAINED).exists()]
    if args.only in (None, "features") and left:
        fill_features(base, left)
    if args.only in (None, "training"):
        for name in left:
            train_arm(base, name)
    if args.only in (None, "measuring"):
        for name in arms:
            measure_arm(base, name, args)
    print(table(args.out))


if __name__ == "__main__":
    main()
