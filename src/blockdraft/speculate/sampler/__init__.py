"""The sampler: which token comes next, given the logits.

One rule for every temperature. The choice is a function of the processed logits, the seed, the
sample index and the absolute position, and of nothing else. The target's choice verifies a draft;
the drafter applies the same function to its own logits to guess it, so that both see the same noise
(drafter-invariant speculative decoding, Daliri et al., arXiv 2408.07978).

* `choose.py` is the interface: the choices of many rows at once, and those of one sequence.
* `reference.py` is the rule in its plainest form, one row at a time with the noise of a whole
  vocabulary. What `race.py` does faster must equal it to the bit.
* `logits.py` processes logits: penalties (`penalties.py`), bias, grammar, minimum length.
  `filters.py` leaves the survivors: top-k, top-p, min-p.
* `noise.py` is the noise of a token at a position, at random access; `philox.py` makes its bits.
* `logprobs.py` tells log-probabilities of what was chosen; it decides nothing.
"""
