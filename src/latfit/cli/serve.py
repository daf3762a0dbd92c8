"""`latfit serve`: the router as an HTTP proxy for running engines."""

import os
from dataclasses import replace

from latfit.api.requests import ServeRequest
from latfit.cli.options import OutputOptions, verb
from latfit.cli.output import note, print_answer

TOKEN, ENGINE_TOKEN = "LATFIT_TOKEN", "LATFIT_ENGINE_TOKEN"
"""Environment variables: what is on a command line, everybody on the machine can read."""


@verb
def serve(request: ServeRequest, output: OutputOptions) -> None:
    """Route each request to one of several running engines (vLLM, llama.cpp, SGLang) by a policy.

    Proxies OpenAI's /v1/completions and /v1/chat/completions, streams included; answers /v1/models, /health, /metrics.
    Contents of requests are not logged. SIGTERM or Ctrl-C drains running requests; a second one exits at once.

    \b
    latfit serve gpu=http://localhost:8000 cpu=http://localhost:8001 \\
      --times gpu=800ms --times cpu=3s
    """
    from latfit.api import serve as served

    found = served.of(
        replace(
            request,
            token=os.environ.get(TOKEN) or None,
            engine_token=os.environ.get(ENGINE_TOKEN) or None,
            ready=lambda text: note(text, quiet=output.silent),
        )
    )
    print_answer(found, output)
