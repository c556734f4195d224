"""The parts of Gemma that differ from Llama: norms, feed-forward network and embedding.

Modules have the same names as in Llama, so the tensor parallel plan of titanlite applies unchanged.
"""

from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from titanlite.model.llama import FeedForward, Llama, TransformerBlock
from titanlite_gemma import GemmaArchitecture

ACTIVATIONS = {"gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu}


class GemmaNorm(nn.RMSNorm):
    """RMSNorm in fp32 that multiplies by 1 + weight."""

    def reset_parameters(self) -> None:
        """Set the weights to 0, so that the norm multiplies by 1."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x."""
        normalized = F.rms_norm(x.float(), self.normalized_shape, eps=self.eps)
        return (normalized * (1 + self.weight.float())).type_as(x)


class GatedFeedForward(FeedForward):
    """A gated feed-forward network with the activation of the architecture."""

    def __init__(self, arch: GemmaArchitecture) -> None:
        super().__init__(arch)
        self.activation = ACTIVATIONS[arch.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output of the network."""
        return self.w2(self.activation(self.w1(x)) * self.w3(x))


class GemmaBlock(TransformerBlock):
    """A transformer block with the norms and the feed-forward network of Gemma."""

    def __init__(self, arch: GemmaArchitecture) -> None:
        super().__init__(arch)
        self.attention_norm = GemmaNorm(arch.dim, eps=arch.norm_eps)
        self.ffn_norm = GemmaNorm(arch.dim, eps=arch.norm_eps)
        self.feed_forward = GatedFeedForward(arch)


class Gemma(Llama):
    """A Gemma model. The embedding is scaled by the square root of its width."""

    block = GemmaBlock
    norm_start = 0.0  # the initial weights of norms, which are added to 1
    draws_random_numbers = False  # so activation checkpointing need not save the random state

    def __init__(self, arch: GemmaArchitecture, blocks: range | None = None) -> None:
        super().__init__(arch, blocks)
        if self.norm is not None:
            self.norm = GemmaNorm(arch.dim, eps=arch.norm_eps)

    def embed(self, x: Tensor) -> Tensor:
        """Scale the embeddings x."""
        return x * self.arch.dim**0.5

    def init_std(self, name: str) -> float:
        """Return the standard deviation of the initial values of a parameter.

        The residual stream starts with unit variance, as in Llama.
        """
        return self.arch.dim**-0.5 if name == "tok_embeddings.weight" else super().init_std(name)
