"""A causal LM generates with its cache between training steps.

Source: https://github.com/huggingface/transformers/issues/36051
    https://github.com/johnsmith0031/alpaca_lora_4bit/pull/128
Situation: Between training steps the wrapped causal LM generates (eval mode, no_grad, KV cache), then training
    continues.
Required: Generated tokens as plain, cache used, no recompute/offload work under no_grad; training unaffected.
"""

import torch
from torch import Tensor

from .harness import Case


def build() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        attn_implementation="eager",
        pad_token_id=0,
        attention_dropout=0.2,
    )
    model, ids, generated = LlamaForCausalLM(config).train(), torch.randint(1, 64, (2, 9)), []

    def step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        model.train()
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            tokens = model.generate(
                ids[:, :3],
                attention_mask=torch.ones(2, 3, dtype=torch.long),
                max_new_tokens=5,
                do_sample=False,
                use_cache=True,
            )
        generated.append(tokens[:, 3:].tolist())
        return loss.detach()

    return Case(
        model=model,
        batch=((), {"input_ids": ids, "labels": ids}),
        loss=lambda o: o.loss,
        step=step,
        extra=lambda m: generated,
        optimizer=lambda p: torch.optim.AdamW(p, lr=3e-2),
    )
