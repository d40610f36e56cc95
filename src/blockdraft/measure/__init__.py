"""What a run was made of: stage timings, the ledger, acceptance, provenance.

The ledger, where the time goes:

`with llm.measured() as meter: ...; meter.take()` gives the ledger of what ran inside; `generate`,
`bench speed` and `bench concurrency` take `--ledger`, and `--waterfall FILE` draws it.

1. `measuring.py` gives the engine a `PhaseTimer` (`phases.py`). One clock charges every moment to
   the phase that is open, so the phases sum to the wall time to the nanosecond. What is between
   steps is the phase "stream": text, and whoever reads it.
2. The loop, the target and the drafter tell a `Recorder` (`core/recorder.py`) which phase they are
   in, and what they computed: rows, positions through the head, pairs of queries and keys,
   forwards. The engine hands its timer to both. Without a measurement they hold `NO_RECORDER`: no
   clock is read and nothing is counted.
3. After a step is committed, `step_work.py` knows what its rows were for. A row of a block gives
   the token behind it: rows of kept guesses are *accepted*, the one that gave the target's own
   token is the *bonus*, all others are *wasted*. The time of the forward is split by these rows,
   and among them and the rows of prompts alike. This is an attribution, not a measurement: a
   forward without the wasted rows would not be shorter by their share, since its weights are read
   once for all of them. The projection of features is split likewise, into the drafter's prefill
   and what is generated.
4. `models/arithmetic.py` has the operations and bytes of each unit of work, from the shapes of the
   weights; tests hold the operations against those that torch counts. Left out are norms and
   softmax, rows and keys that only fill a tile up, and activations, which stay in the caches.
5. `ledger.py` joins both: lines, the extra memory, target rows per token, the wasted share, and
   against the ledger of plain decoding the break-even tau: time per drafted pass over time per
   plain token, without the prompts. Drafting gains as far as tau is above it. With the prompts, and
   so with the drafter's own prefill, gains the overall margin.
6. `bench/ledger/tables.py` and `bench/ledger/page.py` show it. `tools/experiments/ledger_sum.py`
   holds the sum of the lines of a run against the clock of its requests, which knows nothing of
   phases.

On a GPU a measured engine waits for the device at every border between phases, or the work of one
would be charged to the next; it is slower then. The waiting is in the lines, and told apart in
JSON.
"""
