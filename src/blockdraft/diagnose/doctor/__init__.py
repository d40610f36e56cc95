"""Why acceptance may be low: the examination behind `blockdraft doctor`.

`cli/doctor.py` runs `examine.py`; docs/diagnosis.md says what each line means.

1. `pair.py` reads what the files of both models say, without their weights: the drafter's config as
   it is, and as its trainer wrote it down.
2. `target_checks.py` and `shape_checks.py` compare, with hashes of `models/fingerprint.py`;
   `machine_checks.py` asks `core/machine.py`.
3. `engine/bundled_prompts.py` answers its 20 prompts. Training measures a drafter by the same code,
   and `train/origin.py` writes it down.
4. `run_checks.py` decodes a prompt twice, the second time from memory. `offline.py` guesses behind
   every token of the answers again, with layer ids one lower and one higher, from features taken
   once.

What cannot be looked at is unknown; a pair that does not load is a finding like any other.
"""
