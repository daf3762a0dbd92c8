"""A real engine without a download: llama.cpp's server (`pip install xllamacpp gguf`) on a model of random weights.

`python llama_engine.py FILE PORT SLOTS CORE WIDTH LAYERS [BATCH]` makes the model, unless the file is there, and
serves it by one thread on one core, BATCH tokens a step at most (llama.cpp's 2048). It imports nothing of latfit, so
that any environment can run it.
"""

import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

HEADS, VOCABULARY, CONTEXT = 4, 512, 1024


def make_model(file: Path, width: int, layers: int) -> None:
    """A llama of 16-bit random weights, whose tokens are bytes and some words."""
    gguf: Any = import_module("gguf")
    writer, rng = gguf.GGUFWriter(str(file), "llama"), np.random.default_rng(0)
    inner = 3 * width
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // HEADS)
    writer.add_vocab_size(VOCABULARY)
    words = VOCABULARY - 259
    tokens = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256))]
    tokens += [f"\u2581{chr(97 + k % 26)}{chr(97 + k // 26)}".encode() for k in range(words)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(k) for k in range(words)])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * words)
    for name, token in (("bos", 1), ("eos", 2), ("unk", 0)):
        getattr(writer, f"add_{name}_token_id")(token)
    shapes = {"token_embd": (VOCABULARY, width), "output": (VOCABULARY, width), "output_norm": (width,)}
    for k in range(layers):
        shapes |= {f"blk.{k}.{name}": (width,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{k}.attn_{name}": (width, width) for name in ("q", "k", "v", "output")}
        shapes |= {f"blk.{k}.ffn_{name}": (inner, width) for name in ("gate", "up")}
        shapes[f"blk.{k}.ffn_down"] = (width, inner)
    for name, shape in shapes.items():
        drawn = np.ones(shape, np.float32) if len(shape) == 1 else rng.standard_normal(shape) * 0.02
        writer.add_tensor(f"{name}.weight", drawn if len(shape) == 1 else drawn.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve(file: Path, port: int, slots: int, batch: int = 0) -> None:
    llama: Any = import_module("xllamacpp")
    wanted = llama.CommonParams()
    wanted.model.path, wanted.model_alias, wanted.port, wanted.hostnames = str(file), {"m"}, port, ["127.0.0.1"]
    wanted.n_parallel, wanted.n_ctx, wanted.verbosity = slots, CONTEXT * slots, 0
    wanted.endpoint_metrics = True
    if batch:
        wanted.n_batch = batch
    wanted.cpuparams.n_threads = wanted.cpuparams_batch.n_threads = 1
    server = llama.Server(wanted)
    print("listening", server.listening_address, flush=True)
    while True:
        time.sleep(60.0)


if __name__ == "__main__":
    path, (port, slots, core, width, layers) = Path(sys.argv[1]), map(int, sys.argv[2:7])
    os.sched_setaffinity(0, {core})
    if not path.exists():
        make_model(path, width, layers)
    serve(path, port, slots, *map(int, sys.argv[7:8]))
