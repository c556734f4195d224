"""The Gemma architecture (https://arxiv.org/abs/2403.08295) for titanlite.

Importing this package registers the architecture `gemma`. It does not import torch, so checking a
job stays fast. titanlite imports `model.py` and `formats.py` when it first needs them.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from titanlite import register
from titanlite.config.flavors import Architecture
from titanlite.config.schema import Section

Activation = Literal["gelu_pytorch_tanh", "relu"]


class Gemma(Section):
    """Options of Gemma beyond the keys of [model]."""

    hidden_act: Activation = "gelu_pytorch_tanh"
    """Activation of the gate in the feed-forward network: GELU (tanh approximation) or ReLU."""


@register("architecture", "gemma", Gemma)
@dataclass(frozen=True)
class GemmaArchitecture(Architecture):
    """Sizes of a Gemma model. It has as many weights as a Llama of the same sizes."""

    model: ClassVar = "titanlite_gemma.model:Gemma"
    families: ClassVar = "titanlite_gemma.formats:FAMILIES"

    architecture: str = "gemma"
    hidden_act: Activation = "gelu_pytorch_tanh"
