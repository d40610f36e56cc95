"""What is measured: on a GPU, and how little of it in a rehearsal."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blockdraft.core.config import DEFAULT_TARGET
from blockdraft.core.files import write_whole

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = "settings.json"


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The shapes of a model; `layers` of it are enough for a test of whole forwards."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each linear layer, apart and side by side."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "q": (queries, self.hidden),
            "k": (keys, self.hidden),
            "qkv": (queries + 2 * keys, self.hidden),
            "o": (self.hidden, queries),
            "gate": (self.intermediate, self.hidden),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocab, self.hidden),
        }
        return {name: shape for name, shape in shapes.items() if _is_first(shapes, name)}


def _is_first(shapes: Mapping[str, tuple[int, int]], name: str) -> bool:
    return next(other for other, shape in shapes.items() if shape == shapes[name]) == name


MODELS = {
    "135M": ModelSize(576, 1536, 9, 3, 64, 49152, 4),
    "1.7B": ModelSize(2048, 8192, 32, 32, 64, 49152, 2),
    "8B": ModelSize(4096, 14336, 32, 8, 128, 128256, 2),
}
TINY_MODELS = {
    "tiny": ModelSize(48, 96, 3, 1, 16, 97, 2),
    "small": ModelSize(64, 160, 4, 4, 16, 130, 1),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Of all parts of one check.

    rows, keys, batches: numbers that are tried. tiles: rows that a product always has. num_requests
    are decoded together at each point of `concurrency`, `max_tokens` each. train_minutes None:
    what is left.
    """

    is_rehearsal: bool = False
    device: str = "cuda"
    target: str = DEFAULT_TARGET
    drafter: str = "auto"
    answers: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bfloat16", "float32", "float16")
    rows: tuple[int, ...] = (*range(1, 65), *range(72, 129, 8), 160, 192, 256, 320, 384, 448, 512)
    tiled_rows: tuple[int, ...] = (1, 2, 7, 16, 33, 64, 100, 128, 200, 512)
    tiles: tuple[int, ...] = (16, 64, 128)
    batches: tuple[int, ...] = (1, 2, 3, 4, 8, 16, 33, 64, 128)
    pages: tuple[int, ...] = (4, 5, 6, 8, 12, 16, 24, 32, 64)
    concurrency: tuple[int, ...] = (1, 8, 32, 128)
    max_tokens: int = 64
    profiled: tuple[int, ...] = (1, 32)
    profiled_steps: int = 5
    train_minutes: float | None = None
    train_steps: int | None = None
    piece_megabytes: int = 15

    @property
    def models(self) -> dict[str, ModelSize]:
        """Whose shapes are tried."""
        return TINY_MODELS if self.is_rehearsal else MODELS


REHEARSAL: dict[str, Any] = {
    "is_rehearsal": True,
    "device": "cpu",
    "rows": (1, 2, 3, 4, 5, 8, 12),
    "tiled_rows": (1, 3, 8, 12),
    "tiles": (4, 16),
    "batches": (1, 2, 3),
    "pages": (2, 3),
    "concurrency": (1, 3),
    "max_tokens": 8,
    "profiled": (1, 2),
    "profiled_steps": 2,
    "train_steps": 2,
}


def settings_for(work: Path, *, is_rehearsal: bool, **changes: Any) -> Settings:
    """The settings of a check; `changes` that are None change nothing."""
    values: dict[str, Any] = {"answers": tuple(map(str, _answers()))}
    if is_rehearsal:
        from gpucheck.tiny_pair import write_tiny_pair

        values = REHEARSAL | write_tiny_pair(work / "tiny")
    return Settings(**values | {k: v for k, v in changes.items() if v is not None})


def _answers() -> list[Path]:
    return sorted((ROOT / "recipes" / "smollm2-135m").glob("answers-*.jsonl.gz"))


def write_settings(path: Path, settings: Settings) -> None:
    """For the processes of the parts."""
    write_whole(path, json.dumps(asdict(settings)))


def read_settings(path: Path) -> Settings:
    """What `write_settings` wrote."""
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return Settings(**values)
