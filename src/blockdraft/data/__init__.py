"""Texts to train on: prompts, the target's own answers to them, and the files that hold both.

The way of an answer:

1. `prompts` reads prompts of files, `hub_datasets` those of data sets, `self_written` lets the
   target write some; `overlap` drops those that a benchmark holds.
2. `generate` asks the target (`answers`, `engine_answers`) and appends what comes to
   `answers.jsonl` (`answer_file`), so that a run that was stopped goes on.
3. `shards` packs what is fit to train on; `history` keeps the manifest of who wrote it and how.
4. `dataset` reads answers as examples, and orders them in batches.
"""
