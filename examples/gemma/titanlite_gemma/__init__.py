"""Gemma's block (https://arxiv.org/abs/2403.08295) for titanlite. Importing this registers the architecture `gemma`.

Invariant: no torch here, so that a job is checked in a fraction of a second. `model.py` has what torch computes, and
`formats.py` what transformers calls it; titanlite imports each when it is first used.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from titanlite import register
from titanlite.config.flavors import Architecture
from titanlite.config.schema import Section

Activation = Literal["gelu_pytorch_tanh", "relu"]


class Gemma(Section):
    """What a Gemma has beside the keys of [model]."""

    hidden_act: Activation = "gelu_pytorch_tanh"
    """Activation of the gate in the feed-forward network: the tanh approximation of GELU, or ReLU."""


@register("architecture", "gemma", Gemma)
@dataclass(frozen=True)
class GemmaArchitecture(Architecture):
    """The numbers of a Gemma. It has as many weights as a Llama of these sizes, so the counts are inherited."""

    model: ClassVar = "titanlite_gemma.model:Gemma"
    families: ClassVar = "titanlite_gemma.formats:FAMILIES"

    architecture: str = "gemma"
    hidden_act: Activation = "gelu_pytorch_tanh"
