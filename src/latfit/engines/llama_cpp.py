"""llama.cpp's server with --metrics (tools/server/README.md).

A prompt's tokens are counted when it is computed, generated ones when requests end. The mean of busy slots since the
start has six digits.
"""

from latfit.engines.engine import SLOT_STEPS, Engine, Name, Option, named

LLAMA_CPP = Engine(
    "llama.cpp",
    ("llamacpp:", "llamacpp_"),
    gauges=named(running="requests_processing", waiting="requests_deferred", kv_usage="kv_cache_usage_ratio"),
    counters=named(
        prompt_tokens="prompt_tokens_total", generation_tokens="tokens_predicted_total", steps="n_decode_total"
    ),
    means={SLOT_STEPS: (Name("n_busy_slots_per_decode"), Name("n_decode_total"))},
    live=False,
    settings={"total_slots": "max_num_seqs"},
    settings_places=("/props",),
    metrics_help="--metrics",
    recording_flag="--metrics",
    steps_help="Start a llama.cpp that publishes n_busy_slots_per_decode.",
    port=8080,
    key="llamacpp",
    options=(
        Option("requests", "parallel"),
        Option("tokens", "batch_size"),
        Option("cache", "ctx_size"),
        Option("shared", "kv_unified", True),
    ),
    program=("llama-server",),
    model_option=("--model",),
    cache_help="--ctx-size is shared out among the slots: each part has to hold the longest prompt with its output.",
)
