"""A serving engine that meets targets of its requests: KV cache, search by simulation, the answer."""
