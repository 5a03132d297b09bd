"""A transformers model with peft adapters and dropout.

Source: https://github.com/huggingface/transformers/issues/26221
    https://github.com/huggingface/peft/issues/1142
Situation: A transformers causal LM (random tiny config) with peft LoRA and dropout; turning recomputation on must
    have no functional effect.
Required: Same losses and adapters as plain, under model.train() with lora_dropout > 0; adapters all non-zero.
"""

import torch

from .harness import Case


def build() -> Case:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        attn_implementation="eager",
    )
    lora = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), lora).train()
    ids = torch.randint(0, 64, (2, 10))
    return Case(
        model=model,
        batch=((), {"input_ids": ids, "labels": ids, "use_cache": False}),
        loss=lambda o: o.loss,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        extra=lambda m: sum(float(p.abs().sum()) == 0 for name, p in m.named_parameters() if "lora_B" in name),
        expect=0,
    )
