"""What `latfit validate` says of a measured serving run: vLLM 0.19 on one RTX 4090, with step costs from a table of
kernel times and nothing calibrated. `python -m benchmarks.validated`; the run and the table are in LATFIT_DATA.
"""

import os
from pathlib import Path

import latfit

DEFAULT = Path(os.environ.get("LATFIT_DATA", "measured"))
STEPS = "steps/llmservingsim_rtx4090_llama-3.1-8b.parquet"
RUN = "requests/vllm_measured_rtx4090_llama-3.1-8b.csv"
BLOCKS = 2588


def main(smoke: bool = False, folder: Path = DEFAULT) -> None:
    """Print the comparison."""
    if smoke or not (folder / RUN).exists():
        print(f"validated: {'skipped, it is no small run' if smoke else f'skipped, no {folder / RUN}'}")
        return
    print(latfit.validate(folder / STEPS, folder / RUN, model="context", kv_blocks=BLOCKS).summary())


if __name__ == "__main__":
    main()
