"""What the compiled kernels read and write, as the sources declare it."""

import ctypes


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
        ("num_read", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("sample_index", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("temperature", ctypes.c_double),
        ("large", Large),
        ("features", Features),
        ("guess_depth", ctypes.c_int64),
        ("num_nodes", ctypes.c_int64),
        ("max_depth", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("parents", ctypes.c_void_p),
        ("probabilities", ctypes.c_void_p),
        ("text", ctypes.c_void_p),
        ("num_found", ctypes.c_int64),
    )
