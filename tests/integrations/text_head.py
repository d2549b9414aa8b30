"""A language model head on a decoder that transformers has with images only."""

from __future__ import annotations

import torch
from transformers import Glm5NextTextConfig, Glm5NextTextModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextPreTrainedModel


class Glm5NextForCausalLM(Glm5NextPreTrainedModel, GenerationMixin):
    config_class = Glm5NextTextConfig

    def __init__(self, config: Glm5NextTextConfig) -> None:
        super().__init__(config)
        self.model = Glm5NextTextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.get_input_embeddings()

    def forward(self, logits_to_keep: int = 0, **inputs: object) -> CausalLMOutputWithPast:
        output = self.model(**inputs)
        logits = self.lm_head(output.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)
