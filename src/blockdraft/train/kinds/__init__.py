"""The kinds of drafters that can be trained.

All learn from the same answers, at the same places, by the same loss, in the same time; only what
computes the guesses differs. So a kind says little (`base.py`): what it reads of the target, its
parameters, its hidden states at the slots behind an anchor, and how it is saved. The slots' states
go through the target's head, which like its embedding is not trained.

* `block.py`: DFlash, DFlash 2, and block diffusion without features of the target.
* `eagle3.py`: EAGLE-3, several steps over its own outputs.
* `draft_model.py`: a causal LM of the target's class with fewer layers.

`table.py` finds the kind that a run asks for. What is trained is measured as saved: real decoding
loads the folder as serving does.
"""
