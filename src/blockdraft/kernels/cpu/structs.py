"""What the compiled kernels read and write, as the sources declare it."""

import ctypes

_COUNT, _SEED, _FLAG = ctypes.c_int64, ctypes.c_uint64, ctypes.c_int
_ADDRESS, _FLOAT, _DOUBLE = ctypes.c_void_p, ctypes.c_float, ctypes.c_double


def _fields(*groups: tuple[type, str]) -> list[tuple[str, type]]:
    """Names, side by side those of one type, in the order in which they lie."""
    return [(name, kind) for kind, names in groups for name in names.split()]


class Plan(ctypes.Structure):
    """`Plan` of attention.h."""

    _fields_ = _fields(
        (_COUNT, "num_rows num_spans"),
        (_ADDRESS, "spans pages"),
        (_COUNT, "num_pages"),
        (_ADDRESS, "ranges"),
        (_COUNT, "num_ranges"),
        (_ADDRESS, "bias"),
        (_COUNT, "bias_stride num_keys"),
        (_ADDRESS, "slots paths path_slots"),
        (_COUNT, "num_path_slots num_threads"),
    )


class Layer(ctypes.Structure):
    """`Layer` of attention.h."""

    _fields_ = _fields(
        (_COUNT, "kv_heads group head_dim head_stride num_slots"),
        (_FLOAT, "scale softcap"),
        (_ADDRESS, "sinks"),
    )


class Pools(ctypes.Structure):
    """`Pools` of pools.h."""

    _fields_ = _fields(
        (_ADDRESS, "keys values key_scales value_scales"),
    )


class Product(ctypes.Structure):
    """`Product` of product.h."""

    _fields_ = _fields(
        (_ADDRESS, "weight bias"),
        (_COUNT, "inputs outputs is_narrow"),
        (_ADDRESS, "scales"),
        (_COUNT, "group_bits has_minimums is_read_again"),
    )


class Weights(ctypes.Structure):
    """`Weights` of layer.cpp."""

    _fields_ = _fields(
        (Product, "qkv o gate_up down"),
        (_ADDRESS, "norm mlp_norm query_norm key_norm"),
        (_FLOAT, "eps mlp_eps head_eps"),
        (_FLAG, "rounds_first"),
    )


class Head(ctypes.Structure):
    """`Head` of layer.cpp."""

    _fields_ = _fields(
        (Product, "product"),
        (_ADDRESS, "norm"),
        (_FLOAT, "eps"),
        (_FLAG, "rounds_first"),
    )


class Recurrence(ctypes.Structure):
    """`Recurrence` of recurrence.h."""

    _fields_ = _fields(
        (_COUNT, "key_heads value_heads key_dim value_dim channels taps decays norm_size"),
        (_ADDRESS, "convolution convolution_bias decay_rates decay_biases skips norm"),
        (_FLOAT, "eps write_scale min_start max_start"),
        (_FLAG, "rounds_first gates_first gate_is_sigmoid kind"),
    )


class StateSpan(ctypes.Structure):
    """`StateSpan` of recurrence.h."""

    _fields_ = _fields(
        (_COUNT, "first num_rows"),
        (_ADDRESS, "inputs_before before inputs_after after"),
    )


class RecurrenceCall(ctypes.Structure):
    """`RecurrenceCall` of recurrence.h."""

    _fields_ = _fields(
        (_ADDRESS, "rule inputs decay write gate"),
        (_COUNT, "inputs_stride decay_stride write_stride gate_stride"),
        (_ADDRESS, "output convolved decays writes read spans"),
        (_COUNT, "num_spans num_rows"),
    )


class HydraHead(ctypes.Structure):
    """`HydraHead` of hydra_head.h."""

    _fields_ = _fields(
        (Product, "join join_on heads out gate_up down score"),
        (_ADDRESS, "feature_norms embedding_norm state_norm next_norm attention_norm norm"),
        (_ADDRESS, "last_norm frequencies"),
        (_COUNT, "num_heads num_keys head_dim window"),
        (_ADDRESS, "embedding"),
        (_COUNT, "embedding_is_bfloat16"),
        (_ADDRESS, "read_places"),
        (_COUNT, "num_features num_values num_tokens"),
        (_ADDRESS, "token_ids places"),
        (_DOUBLE, "covered"),
        (_FLOAT, "eps"),
    )


class TablePart(ctypes.Structure):
    """`TablePart` of ngrams.cpp."""

    _fields_ = _fields(
        (_ADDRESS, "keys"),
        (_COUNT, "num"),
        (_ADDRESS, "starts rests tokens levels"),
    )


class Belief(ctypes.Structure):
    """`Belief` of ngrams.cpp."""

    _fields_ = _fields(
        (_DOUBLE, "known_token"),
        (ctypes.c_double * 3, "priors"),
    )


class Rules(ctypes.Structure):
    """`Rules` of ngrams.cpp."""

    _fields_ = _fields(
        (TablePart * 3, "parts"),
        (_ADDRESS, "frequencies"),
        (_COUNT, "num_frequencies"),
        (_ADDRESS, "probabilities"),
        (_COUNT, "head"),
        (Belief, "beside_table beside_guess"),
        (_DOUBLE, "least_probability most_noise"),
        (_COUNT, "max_remembered"),
        (_ADDRESS, "guesser"),
        (_DOUBLE, "guess_weight"),
        (_COUNT, "num_guesses"),
        (_DOUBLE, "guess_temperature"),
        (_COUNT, "num_guessed_on"),
        (_DOUBLE, "least_guessed_on"),
    )


class Large(ctypes.Structure):
    """`Large` of ngrams.cpp."""

    _fields_ = _fields(
        (_ADDRESS, "tokens noise"),
        (_COUNT, "num"),
    )


class Features(ctypes.Structure):
    """`Features` of hydra_head.h."""

    _fields_ = _fields(
        (_ADDRESS, "values"),
        (_COUNT, "is_bfloat16 num_rows"),
    )


class Search(ctypes.Structure):
    """`Search` of ngrams.cpp."""

    _fields_ = _fields(
        (_ADDRESS, "token_ids"),
        (_COUNT, "num_known num_tokens num_text num_read"),
        (_SEED, "seed sample_index position"),
        (_DOUBLE, "temperature"),
        (Large, "large"),
        (Features, "features"),
        (_COUNT, "guess_depth num_nodes max_depth"),
        (_ADDRESS, "tokens parents probabilities text"),
        (_COUNT, "num_found"),
    )
