"""Text Generation Inference: https://huggingface.co/docs/text-generation-inference/reference/metrics.

Requests and tokens are counted when requests end.
"""

from latfit.engines.engine import Engine, named

TGI = Engine(
    "TGI",
    ("tgi_",),
    gauges=named(running="batch_current_size", waiting="queue_size"),
    counters=named(finished="request_success"),
    histograms=named(
        latency="request_duration",
        queue="request_queue_duration",
        inference="request_inference_duration",
        tpot="request_mean_time_per_token_duration",
        prompt_lengths="request_input_length",
        output_lengths="request_generated_tokens",
    ),
    live=False,
    port=3000,
)
