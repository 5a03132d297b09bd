"""Adapters are switched, disabled and merged around the training forwards.

Situation: Preference training with peft: the reference is the same model with its adapters disabled, under no_grad,
    in the middle of a step; a second adapter becomes active; the adapter is merged into the weights for an
    evaluation, between forward and backward of nothing, and unmerged.
Required: As plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .harness import Case


def build() -> Case:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    lora = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), lora, adapter_name="first").train()
    dora = LoraConfig(r=2, use_dora=True, target_modules=["o_proj"], task_type="CAUSAL_LM")
    model.add_adapter("second", dora)
    good, bad, log = torch.randint(0, 40, (2, 7)), torch.randint(0, 40, (2, 7)), []

    def score(model: torch.nn.Module, ids: Tensor) -> Tensor:
        log_p = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
        return log_p.gather(-1, ids[:, 1:, None]).sum((1, 2))

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        model.set_adapter("second" if i == 2 else "first")
        optimizer.zero_grad()
        margin = score(model, good) - score(model, bad)
        with model.disable_adapter(), torch.no_grad():
            reference = score(model, good) - score(model, bad)
        loss = -F.logsigmoid(0.1 * (margin - reference)).mean()
        loss.backward()
        optimizer.step()
        model.merge_adapter()
        model.eval()
        with torch.no_grad():
            log.append(float(score(model, good).sum()))
        model.train()
        model.unmerge_adapter()
        return loss.detach()

    return Case(
        model=model,
        batch=((), {"input_ids": good, "use_cache": False}),
        loss=lambda o: o.logits.square().mean(),
        step=step,
        steps=4,
        extra=lambda m: log,
        optimizer=lambda p: torch.optim.AdamW([q for q in model.parameters() if q.ndim > 0], lr=1e-2),
    )
