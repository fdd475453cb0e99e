"""Mistral 3: the language model of an image-and-text checkpoint, a Mistral or a Ministral; its vision tensors are skipped.

Checkpoints name the same tensors in two ways: `language_model.model.layers.0...` and `language_model.lm_head.weight`, or,
as transformers 5 has them in memory, `model.language_model.layers.0...` and `lm_head.weight`.
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import Discriminator, PositiveInt, Tag, model_validator

from services.worker.models.config import IGNORED, BaseFields, ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.models.mistral import MistralFields
from services.worker.models.registry import register

VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


class Ministral3Fields(MistralFields):
    head_dim: PositiveInt | None = 128
    sliding_window: PositiveInt | None = None

    @model_validator(mode="after")
    def rope_is_told(self) -> Self:
        if not (self.rope_parameters or self.rope_scaling):
            raise ValueError("rope_parameters is missing")
        return self


def _text_model(text: Any) -> str | None:
    return str(text.get("model_type", "mistral")) if isinstance(text, dict) else None


class Mistral3Fields(BaseFields):
    ignored: ClassVar[frozenset[str]] = IGNORED | {
        "vision_config",
        "image_token_index",
        "image_token_id",
        "projector_hidden_act",
        "vision_feature_layer",
        "multimodal_projector_bias",
        "spatial_merge_size",
    }

    text_config: Annotated[
        Annotated[MistralFields, Tag("mistral")] | Annotated[Ministral3Fields, Tag("ministral3")], Discriminator(_text_model)
    ]
    tie_word_embeddings: bool = True

    def config(self) -> ModelConfig:
        # Both levels may tell whether the embeddings are tied, and do not always agree.
        said = {fields.tie_word_embeddings for fields in (self, self.text_config) if "tie_word_embeddings" in fields.model_fields_set}
        return replace(self.text_config.config(), tied_embeddings=said.pop() if len(said) == 1 else None)

    def unknown(self) -> list[str]:
        return super().unknown() + [f"text_config.{name}" for name in self.text_config.unknown()]


@register("Mistral3ForConditionalGeneration")
class Mistral3(Decoder):
    fields = Mistral3Fields

    @staticmethod
    def plain(name: str) -> str:
        return name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)

    def ignores(self, name: str) -> bool:
        return name.startswith(VISION) or super().ignores(name)
