"""Several engines: replicas behind a router, and prefill apart from decoding."""
