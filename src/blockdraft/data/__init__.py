"""Texts to train on: prompts, the target's own answers to them, and the files that hold both.

How an answer comes about:

1. `prompts` reads prompts of files, `hub_datasets` those of data sets, `self_written` lets the
   target write some; `overlap` drops those that a benchmark holds.
2. `generate` asks the target, by our own engine (`engine_answers`) or a server that serves it
   (`endpoint_answers`), and appends what comes to `answers.jsonl` (`answer_file`), so that a run
   that was stopped can be resumed.
3. `shards` packs what is fit to train on; `history` keeps the manifest of who wrote it and how.
4. `dataset` reads answers as examples, holds some of them out and orders the others in batches;
   `store` keeps them in arrays that are mapped from files. `ngrams` counts what follows what.
"""
