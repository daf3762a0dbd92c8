"""`python -m benchmarks.exports [--smoke] [--vllm PYTHON[=FOLDER]]... [--triton PYTHON] [--sglang WHEEL]`"""

import sys

from benchmarks.exports.run import main

if __name__ == "__main__":
    main("--smoke" in sys.argv[1:], [each for each in sys.argv[1:] if each != "--smoke"])
