"""Training: how a drafter is made from the answers of its target.

1. `config_file.py` reads a run: `config.py` is the training, `data/config.py` the answers.
   `estimate.py` tells what a run will be before it starts, and `texts.py` how much there will be
   to learn from; `check.py` finds what would stop it. `keys.py` prints all settings,
   `interrupted.py` says how to resume a run that was interrupted. `__main__.py` is the trainer
   without the command line.
2. `data/` holds prompts, the target's answers to them, and what makes batches of those.
3. A batch says of each token which text of its row it belongs to and where it stands in it: a row
   holds one text, or several packed.
4. `features.py` asks the frozen target for the states that the drafter reads, in every pass or from
   disk. The drafter sees them as it does when it drafts: `models/draft/dflash.py` is the same code.
5. `blocks.py` lays blocks on random answer tokens, others in every pass. A slot sees the features
   of its own text before its anchor, and its own block (`models/draft/masks.py`, dense;
   `models/draft/attention.py`, in tiles on a GPU).
6. `step.py` goes through the blocks a few anchors at a time and through the head in chunks;
   `loss.py` weighs the slots: the answer's token, the target's distribution, or both.
   `fused_loss.py` is the same with a gradient made by hand.
7. `optimizer.py` keeps float32 masters and their average. Several processes (`parallel.py`) draw
   the same step, compute a share of its rows each, and add their gradients; FSDP2 may share the
   target's layers out among them.
8. `evaluate.py` walks over held-out answers; `true_tau.py` decodes with the engine that serves. The
   difference is the gap between training and serving, and should be small.
9. `training_run.py` holds it together: step, evaluate, save; `trainer.py` begins and ends a run,
   and times its steps. What a run leaves: `drafter/` (the best) and `last/`, `log.jsonl`
   (`run_log.py`), `index.html` (`report.py`), `state.pt` (`run_state.py`).
10. `hydra/` trains a head beside a drafter that exists, on the same answers.
"""
