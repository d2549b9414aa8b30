"""A model's own `generate`, with a cache before it: three lines."""

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from asynchicache import CacheConfig, prefix_cached

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
layers = ["sliding_attention"] * 3 + ["full_attention"]
config = Gemma3TextConfig(vocab_size=256, head_dim=16, layer_types=layers, sliding_window=40, **sizes)
model = Gemma3ForCausalLM(config).eval()  # or AutoModelForCausalLM.from_pretrained(...).eval()


def ids(text: str) -> torch.Tensor:
    return torch.tensor([list(text.encode())])  # or tokenizer(text, return_tensors="pt").input_ids


with prefix_cached(model, page_size=16, config=CacheConfig(device_bytes=8 << 20)) as cached:
    first = ids("You answer questions about gardens. When do roses flower?")
    answer = cached.generate(first, max_new_tokens=24)
    print(f"{cached.hit.tokens} tokens from the cache")

    second = torch.cat([answer, ids(" And tulips?")], dim=1)
    answer = cached.generate(second, max_new_tokens=24)
    print(f"{cached.hit.tokens} of {second.shape[1]} tokens from the cache")

print("as without a cache:", torch.equal(answer, model.generate(second, max_new_tokens=24)))
