"""Whether the target is that of the training, and is asked in the same way."""

from collections.abc import Mapping

from safetensors import safe_open

from blockdraft.diagnose.doctor.check import Check
from blockdraft.diagnose.doctor.pair import Pair
from blockdraft.engine.trained_thinking import MIXED, default_thinking
from blockdraft.measure.identity import hash_text
from blockdraft.models.draft.hydra_head import HEAD_NAME
from blockdraft.models.fingerprint import weights_sha256
from blockdraft.models.supported import quantized_by
from blockdraft.models.target.loading import DTYPES
from blockdraft.speculate.drafters.ngram_table import NGRAMS_NAME

_DIGITS: Mapping[str, int] = {
    "float8_e4m3fn": 4,
    "float8_e5m2": 3,
    "bfloat16": 8,
    "float16": 11,
    "float32": 24,
    "float64": 53,
}
"""Significant binary digits of a precision."""
_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"} | {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""As safetensors calls them."""


def weights_check(pair: Pair) -> Check:
    """Quantized, fine-tuned, merged: the features of such a target are not those learned."""
    name, trained = "target weights", pair.fact("target", "weights_sha256")
    method = quantized_by(pair.target.config)
    what = f"quantized ({method})" if method else f"{_type_of(pair)}, not quantized"
    if trained is None:
        return Check(
            name,
            "unknown",
            f"{what}; the drafter does not say which weights it was trained with",
            "if tau is low: run exactly the target that its card names, not quantized or "
            "fine-tuned",
        )
    found = weights_sha256(pair.target_folder)
    rounded, known = pair.config.quantize, pair.fact("target", "quantize")
    if found == trained and rounded != known:
        return Check(
            name,
            "warning",
            f"the drafter was trained with the same weights, but {_rounded(rounded)} at load, and "
            f"{_rounded(known)} in training",
            "compare tau with --quantize and without, or retune the drafter for this target "
            f"(init_from, only_adapter=true{f', quantize={rounded}' if rounded else ''})",
        )
    if found == trained:
        return Check(name, "ok", f"the drafter was trained with the same weights ({found[:12]})")
    return Check(
        name,
        "out",
        f"{what}; hash {found[:12]}, and the drafter was trained with {trained[:12]}: quantized, "
        "fine-tuned, merged or another revision",
        "use the target it was trained with, or train on with this one's answers (init_from)",
    )


def _rounded(quantize: str | None) -> str:
    return "not rounded" if quantize is None else f"rounded to {quantize}"


def _type_of(pair: Pair) -> str:
    return f"{type(pair.target).__name__} of {pair.target_config.num_hidden_layers} layers"


def template_check(pair: Pair) -> Check:
    """The chat template against the one in which the training answers were asked for."""
    name, tokenizer = "chat template", pair.tokenizer
    if pair.fact("target", "weights_sha256") is None and not pair.fact("target", "template_sha256"):
        return Check(
            name,
            "unknown",
            "the drafter does not say which template its answers were made with",
            "if tau is low: use the template of the target's original folder",
        )
    trained = pair.fact("target", "template_sha256")
    found = hash_text(tokenizer.chat_template) if tokenizer.has_chat_template else None
    if found == trained:
        template = f"the one used in training ({found[:12]})" if found else "none, as in training"
        return Check(name, "ok", template)
    return Check(
        name,
        "out",
        f"{_short(found)}, and the drafter was trained with {_short(trained)}",
        "copy chat_template.jinja and tokenizer_config.json of the target it was trained with",
    )


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "none"


def thinking_check(pair: Pair) -> Check:
    """Thinking on or off, as the pair will be asked, against how the drafter was trained."""
    name, tokenizer = "thinking", pair.tokenizer
    if not tokenizer.has_thinking_switch:
        return Check(name, "ok", "the chat template has no switch for it")
    default = default_thinking(tokenizer)
    asked = default if pair.thinking == "template" else pair.thinking
    trained = pair.known_thinking
    if trained is None:
        return Check(
            name,
            "unknown",
            f"requests have thinking {asked}; the drafter does not say how it was trained",
            "compare the tau below with those of --thinking on and --thinking off",
        )
    trained = default if trained == "template" else trained
    if trained in (asked, MIXED):
        return Check(name, "ok", f"{asked}; trained: {trained}")
    switch = "false" if trained == "off" else "true"
    return Check(
        name,
        "out",
        f"requests have thinking {asked}, and the drafter was trained with it {trained}",
        f'send "chat_template_kwargs": {{"enable_thinking": {switch}}}, or use a drafter that '
        f"was trained with thinking {asked}",
    )


def precision_check(pair: Pair) -> Check:
    """The precision of the run, and of the drafter's file, against that of the training."""
    name, run = "precision", str(pair.dtype).removeprefix("torch.")
    stored, broken = _stored_precision(pair)
    if broken:
        return Check(
            name,
            "out",
            f"{broken} of the drafter holds values that are not finite (inf or nan)",
            "a conversion to float16 does that: get the original file",
        )
    trained: str | None = str(pair.fact("target", "dtype") or pair.fact("config", "dtype"))
    source = "trained in"
    if trained not in _DIGITS:
        trained, source = stored, "its file is in"
    if trained is None:
        found = f"runs in {run}; the weights in the drafter's file differ in precision"
        return Check(name, "unknown", found)
    # No target runs in the others.
    precise = trained if trained in DTYPES else "float32"
    for what, have, remedy in (
        ("the drafter's file is in", stored, "get the original file"),
        ("it runs in", run, f"give --dtype {precise}"),
    ):
        if have is not None and _DIGITS.get(have, 0) < _DIGITS[trained]:
            return Check(
                name,
                "out",
                f"{what} {have}, {source} {trained}: its weights and the features are rounded",
                remedy,
            )
    return Check(name, "ok", f"runs in {run}, {source} {trained}")


def _stored_precision(pair: Pair) -> tuple[str | None, str | None]:
    """(the coarsest precision in the drafter's file, the first tensor that holds inf or nan).

    The precision of a GGUF file is not looked at, and None.
    """
    coarsest: str | None = None
    broken = None
    weights = {path.name: path for path in pair.drafter_folder.glob("*.safetensors")}
    for name in (HEAD_NAME, NGRAMS_NAME):
        weights.pop(name, None)  # they draft beside it, in a precision of their own
    for path in sorted(weights.values()):
        with safe_open(path, framework="pt") as file:
            for tensor_name in file.keys():  # noqa: SIM118 - it is no mapping
                kind = str(file.get_slice(tensor_name).get_dtype())
                dtype = _NAMES.get(kind, kind)
                if dtype not in _DIGITS:
                    continue  # token ids, not weights
                if coarsest is None or _DIGITS[dtype] < _DIGITS[coarsest]:
                    coarsest = dtype
                if broken is None and not file.get_tensor(tensor_name).float().isfinite().all():
                    broken = tensor_name
    return coarsest, broken
