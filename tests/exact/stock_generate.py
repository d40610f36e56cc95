"""Greedy decoding by transformers alone: no blockdraft in the process.

python tests/exact/stock_generate.py JOB    reads folder, dtype, prompts and num_tokens from the
JSON file JOB and writes the new token ids beside it, to JOB.out
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


def main(path: Path) -> None:
    """Run one job."""
    job = json.loads(path.read_text())
    torch.set_num_threads(job["num_threads"])
    dtype = getattr(torch, job["dtype"])
    model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=dtype).eval()
    config = GenerationConfig(max_new_tokens=job["num_tokens"], do_sample=False, pad_token_id=0)
    model.generation_config = config
    outputs = []
    for prompt in job["prompts"]:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids))
        outputs.append(output[0, len(prompt) :].tolist())
    assert not any(name.startswith("blockdraft") for name in sys.modules)
    Path(f"{path}.out").write_text(json.dumps(outputs))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
