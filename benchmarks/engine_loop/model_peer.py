"""A small Llama and its tokenizer without a hub: `PYTHON model_peer.py FOLDER`, by the Python that vLLM runs in.

40 million parameters, whose values vLLM draws itself (`--load-format dummy`); what they are does not change how long a
step takes. The tokenizer is a byte-level BPE of random words.
"""

import random
import string
import sys
from typing import Any

WORDS, TEXTS, VOCABULARY = 20_000, 4_000, 8_000


def main(folder: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(WORDS)]
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((" ".join(draw.choices(words, k=50)) for _ in range(TEXTS)), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
        tie_word_embeddings=False,
    ).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
