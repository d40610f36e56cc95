"""Log-probabilities of what was chosen; they decide nothing."""

import torch
from torch import Tensor


def token_logprobs(
    logits: Tensor, token_id: int, num_top: int
) -> tuple[float, list[tuple[int, float]]]:
    """Log-probability of a token, and the `num_top` most likely tokens with theirs.

    logits: [V], as the target gave them: no temperature, penalty or filter. Where the vocabulary
    has fewer tokens, all are told.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top = logprobs.topk(min(num_top, logprobs.shape[0]))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return float(logprobs[token_id]), list(pairs)
