"""Vision models from transformers: CLIP's contrastive loss and a ViT with masked patches.

Situation: Tiny random configs; CLIP returns its loss with nested outputs of both towers, ViT interpolates its
    position embeddings to another image size and drops out.
Required: As plain.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .harness import Case


class ClipAndVit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import CLIPConfig, CLIPModel, ViTConfig, ViTForImageClassification

        tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        text = {**tower, "vocab_size": 40, "max_position_embeddings": 8, "eos_token_id": 39, "bos_token_id": 38}
        vision = {**tower, "image_size": 8, "patch_size": 4, "attention_dropout": 0.1}
        self.clip = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
        self.vit = ViTForImageClassification(
            ViTConfig(**tower, image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=0.1)
        )

    def forward(self, ids: Tensor, images: Tensor, labels: Tensor) -> tuple[Tensor, Any]:
        clip = self.clip(input_ids=ids, pixel_values=images, return_loss=True)
        larger = nn.functional.interpolate(images, scale_factor=1.5)
        vit = self.vit(larger, labels=labels, interpolate_pos_encoding=True)
        return clip.loss + vit.loss + 0.01 * clip.vision_model_output.pooler_output.square().mean(), clip


def build() -> Case:
    ids, images, labels = torch.randint(0, 38, (3, 5)), torch.randn(3, 3, 8, 8), torch.arange(3)
    ids[:, -1] = 39
    return Case(
        model=ClipAndVit().train(),
        batch=((ids, images, labels), {}),
        loss=lambda o: o[0],
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
