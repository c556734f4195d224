"""The Hugging Face config.json of `GemmaForCausalLM`, for import and export."""

from typing import ClassVar

from pydantic import Field

from titanlite.model.formats import HFConfig
from titanlite_gemma import Activation, GemmaArchitecture


class GemmaConfig(HFConfig):
    """A Gemma config.json. Fields with an alias belong to the architecture."""

    kind: ClassVar = "gemma"
    causal_lm: ClassVar = "GemmaForCausalLM"
    architecture: ClassVar = GemmaArchitecture

    head_dim: int = Field(256, alias="head_dim")
    tied_embeddings: bool = Field(True, alias="tie_word_embeddings")
    hidden_act: Activation = Field("gelu_pytorch_tanh", alias="hidden_act")  # pyright: ignore
    hidden_activation: Activation | None = None  # the name of an earlier version
    use_bidirectional_attention: None = None


FAMILIES = (GemmaConfig,)
