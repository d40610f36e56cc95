"""The line that mathematics benchmarks add to a question. Loads no model library."""

BOXED_LINE = "\nPlease reason step by step, and put your final answer within \\boxed{}."
