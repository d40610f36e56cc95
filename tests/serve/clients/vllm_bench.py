"""`vllm bench serve` with the arguments of this program.

vLLM's own command does not start in its build for CPUs, which is a package of another name.
"""

from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())
