"""Why a draft was rejected: it looks on from outside, and without it nothing is computed.

1. `engine/observer.py`: an engine tells its observer what the target decided, before it is
   committed, and what was committed. A drafter shows its logits to its `watch`
   (`speculate/drafters/base.py`).
2. `record.py` is both. It keeps a `Round` (`round.py`) for every target pass: what was drafted, how
   much was kept, and the first rejected token.
3. `cause.py` weighs that slot: the probability of the token that the target wanted, its rank for
   the drafter, the entropy of both, all of the logits after penalties and at temperature 1. Each
   rejection gets one cause, the first that holds: the answer ended (`stop`); the wanted token is
   not in the drafter's vocabulary (`vocabulary`); without penalties, biases, grammar and minimum
   length both would have chosen the same (`penalty`), or at temperature 0 (`noise`), by the choice
   rule itself; the target gave no token half of the probability (`target_uncertain`), or did
   (`drafter_wrong`). `other` is what the recorded logits do not explain.
4. `text/kinds.py` tells the kind of each token of the output: code, JSON, digits, other scripts
   than Latin, names, punctuation, prose. `sums.py` counts by kind and by place in the block,
   `groups.py` by kind of prompt, with examples.
5. `stream.py` times the same answer as it streams, drafted and plain: gaps, bursts, and stalls with
   the phase of `measure/phases.py` that took longer than usual.
6. `terminal.py` and `page.py` show it: the answer with its drafts marked, every round, and on the
   page the stream as a timeline of its bursts.

Text that comes a block at a time can be let go evenly: `generate --smooth` hands it to
`text/pacing.py`, which lets nothing wait longer than a quarter of a second and changes none of it.
"""
