"""A claim that users check themselves: drafting changes nothing.

How a proof goes:

`cli/prove.py` reads the options, or those of a certificate (`replay.py`), and runs `prove.py`,
whose stages fill one `Findings` (`findings.py`):

1. `corpus.py` reads the bundled prompts (`corpus.jsonl`) and the user's; `cases.py` gives each some
   of the settings of its table.
2. `ways.py` is a table of ways to run a case through the ordinary `LLM`. Plain decoding is run
   first; every other way must give the same (`differences.py`).
3. With `--exact off` a difference is judged by `forced.py`: the drafted tokens are put to the
   target one by one, and each may be off by no more than shapes alone make on this pair.
4. Features of the wrong tokens change no output, only the guesses. `context.py` therefore compares
   the draft keys and values in the middle of a run with those of one forward.
5. `faults.py` plants faults around the engine, and `controls.py` is the table of them with the
   check that must find each. The tests of losslessness plant the same ones.
6. `distribution.py` counts samples of the choice rule where probabilities can be enumerated, and
   `agreement.py` asks stock transformers.
7. `certificate.py` makes plain values of all that, with the hashes of `measure/identity.py`;
   `summary.py` puts them in words, for the terminal and for `page.py`.

What an interrupt leaves is the same certificate, marked as partial.
"""
