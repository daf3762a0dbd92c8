"""Several engines: replicas behind a router, fixed or coming and going, and prefill apart from decoding."""
