"""The compiled kernels as functions of C, loaded once a process."""

import ctypes
import logging
import os
from functools import lru_cache

from blockdraft.kernels.cpu.build import build

SWITCH = "BLOCKDRAFT_KERNELS"
"""Environment variable: "off" leaves everything to torch."""

_ADDRESS, _COUNT, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int

_SIGNATURES: dict[str, list[type]] = {
    "norm": [_FLAG, *[_ADDRESS] * 5, *[_COUNT] * 2, ctypes.c_float, _FLAG, _FLAG],
    "rotate": [_FLAG, _ADDRESS, _COUNT, *[_ADDRESS] * 4, *[_COUNT] * 4, ctypes.c_float, _FLAG,
               _FLAG],
    "gate": [_FLAG, *[_ADDRESS] * 2, *[_COUNT] * 2, _FLAG],
    "attend": [_FLAG, *[_ADDRESS] * 3, *[_ADDRESS, _COUNT, _COUNT] * 3, _ADDRESS],
    "product_step": [_FLAG],
    "product_panel": [],
    "int8_step": [],
    "group_panel": [],
    "reads_narrow": [],
    "uses_matrices": [],
    "multiply": [_FLAG, *[_ADDRESS] * 3, _COUNT, _FLAG],
    "layer": [_FLAG, *[_ADDRESS] * 8],
    "layers": [
        *[_FLAG, _COUNT, *[_ADDRESS] * 4, _COUNT],
        *[*[_ADDRESS] * 3, _COUNT, *[_ADDRESS] * 4],
        *[_ADDRESS, _ADDRESS, _COUNT, _ADDRESS],
    ],
    "recurrence": [_FLAG, _ADDRESS, _FLAG],
    "recurrence_key_dim": [],
    "recurrence_taps": [],
    "recurrence_panel": [],
    "largest": [_FLAG, *[_ADDRESS] * 4, *[_COUNT] * 3],
    "first_largest": [_FLAG, *[_ADDRESS] * 2, *[_COUNT] * 2],
    "sampled": [_FLAG, _ADDRESS, _COUNT, ctypes.c_double, *[_ADDRESS] * 3, _COUNT,
                *[ctypes.c_double] * 2],
    "widen": [*[_ADDRESS] * 2, _COUNT],
    "store_context": [_FLAG, *[_ADDRESS] * 5, *[_COUNT] * 2, _ADDRESS, ctypes.c_float,
                      *[_ADDRESS] * 2],
    "words_at": [*[_ADDRESS] * 3, _COUNT, _ADDRESS],
    "words_below": [*[_ADDRESS] * 3, _COUNT, _ADDRESS, _COUNT, ctypes.c_uint64, _COUNT],
    "text_new": [],
    "text_delete": [_ADDRESS],
    "guess_ahead": [*[_ADDRESS] * 3, _FLAG, _COUNT, _ADDRESS, _COUNT],
    "ngrams": [*[_ADDRESS] * 2, _COUNT, _COUNT],
}  # fmt: skip
"""As declared in the sources."""

REFUSALS = {
    1: "the head size is no multiple of 16, or over 512",
    2: "spans do not follow each other from row 0 on, or go beyond the rows of the forward",
    3: "a slot lies outside of the buffer of keys and values, or none are given to a whole layer",
    4: "a row would see keys outside of its pages or of the buffer",
    5: "a page lies outside of the table or of the buffer of keys and values",
    6: "there are no heads or no threads",
    7: "a key of a path lies outside of the table or of the buffer of keys and values",
}
"""Of `Refusal` in checks.h."""

logger = logging.getLogger(__name__)


class Library:
    """The functions of the sources, without their prefix."""

    def __init__(self, path: str) -> None:
        loaded = ctypes.CDLL(path)
        self.norm = _function(loaded, "norm")
        self.rotate = _function(loaded, "rotate")
        self.gate = _function(loaded, "gate")
        self.attend = _checked(_function(loaded, "attend"))
        self.product_step = _function(loaded, "product_step")
        self.product_step.restype = _COUNT
        self.product_panel = _function(loaded, "product_panel")
        self.product_panel.restype = _COUNT
        self.int8_step = _function(loaded, "int8_step")
        self.int8_step.restype = _COUNT
        self.group_panel = _function(loaded, "group_panel")
        self.group_panel.restype = _COUNT
        self.reads_narrow = _function(loaded, "reads_narrow")
        self.reads_narrow.restype = _FLAG
        uses_matrices = _function(loaded, "uses_matrices")
        uses_matrices.restype = _FLAG
        # Asked at once: the answer may be another one when there are more threads.
        self.uses_matrices = bool(uses_matrices())
        """Whether products in bfloat16, those of attention too, run in matrix registers."""
        self.multiply = _function(loaded, "multiply")
        self.layer = _checked(_function(loaded, "layer"))
        self.layers = _checked(_function(loaded, "layers"))
        self.recurrence = _function(loaded, "recurrence")
        self.recurrence_key_dim = _function(loaded, "recurrence_key_dim")
        self.recurrence_key_dim.restype = _COUNT
        self.recurrence_taps = _function(loaded, "recurrence_taps")
        self.recurrence_taps.restype = _COUNT
        self.recurrence_panel = _function(loaded, "recurrence_panel")
        self.recurrence_panel.restype = _COUNT
        self.largest = _function(loaded, "largest")
        self.first_largest = _function(loaded, "first_largest")
        self.sampled = _function(loaded, "sampled")
        self.sampled.restype = _COUNT
        self.widen = _function(loaded, "widen")
        self.store_context = _checked(_function(loaded, "store_context"))
        self.words_at = _function(loaded, "words_at")
        self.words_below = _function(loaded, "words_below")
        self.text_new = _function(loaded, "text_new")
        self.text_new.restype = _ADDRESS
        self.text_delete = _function(loaded, "text_delete")
        self.guess_ahead = _function(loaded, "guess_ahead")
        self.ngrams = _function(loaded, "ngrams")


class Plan(ctypes.Structure):
    """`Plan` of attention.h."""

    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("num_spans", ctypes.c_int64),
        ("spans", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("num_pages", ctypes.c_int64),
        ("ranges", ctypes.c_void_p),
        ("num_ranges", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("bias_stride", ctypes.c_int64),
        ("num_keys", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("paths", ctypes.c_void_p),
        ("path_slots", ctypes.c_void_p),
        ("num_path_slots", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
    )


class Layer(ctypes.Structure):
    """`Layer` of attention.h."""

    _fields_ = (
        ("kv_heads", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("sinks", ctypes.c_void_p),
    )


class Pools(ctypes.Structure):
    """`Pools` of pools.h."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_scales", ctypes.c_void_p),
        ("value_scales", ctypes.c_void_p),
    )


class Product(ctypes.Structure):
    """`Product` of product.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("is_narrow", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("group_bits", ctypes.c_int64),
        ("has_minimums", ctypes.c_int64),
        ("is_read_again", ctypes.c_int64),
    )


class Weights(ctypes.Structure):
    """`Weights` of layer.cpp."""

    _fields_ = (
        ("qkv", Product),
        ("o", Product),
        ("gate_up", Product),
        ("down", Product),
        ("norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("mlp_eps", ctypes.c_float),
        ("head_eps", ctypes.c_float),
        ("rounds_first", ctypes.c_int),
    )


class Head(ctypes.Structure):
    """`Head` of layer.cpp."""

    _fields_ = (
        ("product", Product),
        ("norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("rounds_first", ctypes.c_int),
    )


class Recurrence(ctypes.Structure):
    """`Recurrence` of recurrence.h."""

    _fields_ = (
        ("key_heads", ctypes.c_int64),
        ("value_heads", ctypes.c_int64),
        ("key_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("taps", ctypes.c_int64),
        ("decays", ctypes.c_int64),
        ("norm_size", ctypes.c_int64),
        ("convolution", ctypes.c_void_p),
        ("convolution_bias", ctypes.c_void_p),
        ("decay_rates", ctypes.c_void_p),
        ("decay_biases", ctypes.c_void_p),
        ("skips", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("write_scale", ctypes.c_float),
        ("min_start", ctypes.c_float),
        ("max_start", ctypes.c_float),
        ("rounds_first", ctypes.c_int32),
        ("gates_first", ctypes.c_int32),
        ("gate_is_sigmoid", ctypes.c_int32),
        ("kind", ctypes.c_int32),
    )


class StateSpan(ctypes.Structure):
    """`StateSpan` of recurrence.h."""

    _fields_ = (
        ("first", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("inputs_before", ctypes.c_void_p),
        ("before", ctypes.c_void_p),
        ("inputs_after", ctypes.c_void_p),
        ("after", ctypes.c_void_p),
    )


class RecurrenceCall(ctypes.Structure):
    """`RecurrenceCall` of recurrence.h."""

    _fields_ = (
        ("rule", ctypes.c_void_p),
        ("inputs", ctypes.c_void_p),
        ("decay", ctypes.c_void_p),
        ("write", ctypes.c_void_p),
        ("gate", ctypes.c_void_p),
        ("inputs_stride", ctypes.c_int64),
        ("decay_stride", ctypes.c_int64),
        ("write_stride", ctypes.c_int64),
        ("gate_stride", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("convolved", ctypes.c_void_p),
        ("decays", ctypes.c_void_p),
        ("writes", ctypes.c_void_p),
        ("read", ctypes.c_void_p),
        ("spans", ctypes.c_void_p),
        ("num_spans", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
    )


class HydraHead(ctypes.Structure):
    """`HydraHead` of hydra_head.h."""

    _fields_ = (
        ("join", Product),
        ("join_on", Product),
        ("heads", Product),
        ("out", Product),
        ("gate_up", Product),
        ("down", Product),
        ("score", Product),
        ("feature_norms", ctypes.c_void_p),
        ("embedding_norm", ctypes.c_void_p),
        ("state_norm", ctypes.c_void_p),
        ("next_norm", ctypes.c_void_p),
        ("attention_norm", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("last_norm", ctypes.c_void_p),
        ("frequencies", ctypes.c_void_p),
        ("num_heads", ctypes.c_int64),
        ("num_keys", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("embedding", ctypes.c_void_p),
        ("embedding_is_bfloat16", ctypes.c_int64),
        ("read_places", ctypes.c_void_p),
        ("num_features", ctypes.c_int64),
        ("num_values", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("covered", ctypes.c_double),
        ("eps", ctypes.c_float),
    )


class TablePart(ctypes.Structure):
    """`TablePart` of ngrams.cpp."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("num", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("rests", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("levels", ctypes.c_void_p),
    )


class Belief(ctypes.Structure):
    """`Belief` of ngrams.cpp."""

    _fields_ = (
        ("known_token", ctypes.c_double),
        ("priors", ctypes.c_double * 3),
    )


class Rules(ctypes.Structure):
    """`Rules` of ngrams.cpp."""

    _fields_ = (
        ("parts", TablePart * 3),
        ("frequencies", ctypes.c_void_p),
        ("num_frequencies", ctypes.c_int64),
        ("probabilities", ctypes.c_void_p),
        ("head", ctypes.c_int64),
        ("beside_table", Belief),
        ("beside_guess", Belief),
        ("least_probability", ctypes.c_double),
        ("most_noise", ctypes.c_double),
        ("max_remembered", ctypes.c_int64),
        ("guesser", ctypes.c_void_p),
        ("guess_weight", ctypes.c_double),
        ("num_guesses", ctypes.c_int64),
        ("guess_temperature", ctypes.c_double),
        ("guess_depth", ctypes.c_int64),
        ("num_guessed_on", ctypes.c_int64),
        ("least_guessed_on", ctypes.c_double),
    )


class Large(ctypes.Structure):
    """`Large` of ngrams.cpp."""

    _fields_ = (
        ("tokens", ctypes.c_void_p),
        ("noise", ctypes.c_void_p),
        ("num", ctypes.c_int64),
    )


class Features(ctypes.Structure):
    """`Features` of hydra_head.h."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("is_bfloat16", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
    )


class Search(ctypes.Structure):
    """`Search` of ngrams.cpp."""

    _fields_ = (
        ("token_ids", ctypes.c_void_p),
        ("num_known", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_text", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("sample_index", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("temperature", ctypes.c_double),
        ("large", Large),
        ("features", Features),
        ("num_nodes", ctypes.c_int64),
        ("max_depth", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("parents", ctypes.c_void_p),
        ("probabilities", ctypes.c_void_p),
        ("text", ctypes.c_void_p),
        ("num_found", ctypes.c_int64),
    )


@lru_cache
def library() -> Library | None:
    """The kernels, or None where they are off or cannot be had; the log says why, once."""
    if os.environ.get(SWITCH, "").lower() == "off":
        logger.info("%s=off: torch's operations instead of kernels", SWITCH)
        return None
    try:
        return _loaded()
    # Whatever keeps a machine from compiling, from a home folder that is missing to a compiler that
    # is another program: models run without kernels.
    except Exception as reason:
        logger.warning("no kernels for this CPU, steps take longer: %s", reason)
        return None


def _loaded() -> Library:
    path = build()
    try:
        return Library(str(path))
    except OSError as reason:  # no library, or half of one
        logger.warning("%s does not load and is compiled again: %s", path, reason)
        path.unlink(missing_ok=True)
        return Library(str(build()))


def _function(loaded: ctypes.CDLL, name: str) -> "ctypes._NamedFuncPointer":
    function = loaded[f"blockdraft_{name}"]
    function.argtypes = _SIGNATURES[name]
    function.restype = None
    return function


def _checked(function: "ctypes._NamedFuncPointer") -> "ctypes._NamedFuncPointer":
    """A function that returns a Refusal raises RuntimeError for it."""
    function.restype = ctypes.c_int
    function.errcheck = _raise_refusal  # type: ignore[assignment]  # typed for any result
    return function


def _raise_refusal(refusal: int, *_: object) -> None:
    if refusal:
        raise RuntimeError(f"a kernel refused its arguments: {REFUSALS[refusal]}")
