"""The parts of a transformer block beside attention: norms, feed-forward, residual connections."""

from collections.abc import Callable
from functools import partial
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparseformer.config import Activation, NormName, NormPosition

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swish": F.silu,
}


def make_norm(norm: NormName, d_model: int, *, eps: float | None = None) -> nn.Module:
    """Build a normalisation over the last dimension.

    layer_norm: (x - mean) / sqrt(var + eps) * weight + bias; rms_norm: x / sqrt(mean(x ** 2) + eps)
    * weight, without a bias.

    Args:
        norm: layer_norm or rms_norm.
        d_model: Size of the last dimension.
        eps: Added to the variance; unset, 1e-5 for layer_norm and 1e-6 for rms_norm.

    Raises:
        ValueError: If norm is unknown.

    Source: Ba et al. 2016, arXiv 1607.06450; Zhang and Sennrich 2019, arXiv 1910.07467.
    """
    if norm == "layer_norm":
        return nn.LayerNorm(d_model, eps=1e-5 if eps is None else eps)
    if norm == "rms_norm":
        return nn.RMSNorm(d_model, eps=1e-6 if eps is None else eps)
    raise ValueError(f"norm is {norm!r}, but it must be one of {get_args(NormName)}.")


class FeedForward(nn.Module):
    """Transform every position by itself.

        plain:  W2 act(W1 x + b1) + b2
        gated:  W2 (act(W1 x + b1) * (V x + c)) + b2

    The two input projections of a gated block are one matrix, `in_proj` = [W1; V].

    Args:
        d_model: Width of the input and the output.
        ffn_dim: Inner width.
        activation: relu, gelu (erf), gelu_tanh, swish, or gated_ and one of these.
        bias: False leaves out every bias (T5).

    Raises:
        ValueError: If activation is unknown.

    Source: Vaswani et al. 2017, arXiv 1706.03762; Shazeer 2020, "GLU Variants", arXiv 2002.05202.
    """

    def __init__(
        self,
        d_model: int,
        ffn_dim: int,
        *,
        activation: Activation = "relu",
        bias: bool = True,
    ) -> None:
        super().__init__()
        if activation not in get_args(Activation):
            raise ValueError(
                f"activation is {activation!r}, but it must be one of {get_args(Activation)}."
            )
        self.is_gated = activation.startswith("gated_")
        self.activation = ACTIVATIONS[activation.removeprefix("gated_")]
        self.in_proj = nn.Linear(d_model, ffn_dim * (2 if self.is_gated else 1), bias=bias)
        self.out_proj = nn.Linear(ffn_dim, d_model, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights by Xavier's uniform rule, each of a gated pair by itself; zero biases."""
        for weight in self.in_proj.weight.chunk(2 if self.is_gated else 1):
            nn.init.xavier_uniform_(weight)
        nn.init.xavier_uniform_(self.out_proj.weight)
        for linear in (self.in_proj, self.out_proj):
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block.

        Args:
            x: [..., d_model].

        Returns:
            [..., d_model] in x's dtype; fp32 where the inner values are fp16, because the sum over
            ffn_dim passes 65504 in published models. `Residual` returns to x's dtype.
        """
        inner: Tensor = self.in_proj(x)
        if self.is_gated:
            gate, inner = inner.chunk(2, dim=-1)
            inner = self.activation(gate) * inner
        else:
            inner = self.activation(inner)
        if inner.dtype == torch.float16:
            return self._sum_in_fp32(inner)
        output: Tensor = self.out_proj(inner)
        return output

    def _sum_in_fp32(self, inner: Tensor) -> Tensor:
        bias = self.out_proj.bias
        with torch.autocast(inner.device.type, enabled=False):
            return F.linear(
                inner.float(),
                self.out_proj.weight.float(),
                None if bias is None else bias.float(),
            )


class Residual(nn.Module):
    """Add a sublayer to its input, with the norm before it or after the sum.

        pre:   x + dropout(f(norm(x)))
        post:  norm(x + dropout(f(x)))

    Args:
        norm: A module from `make_norm`.
        position: pre or post.
        dropout: Dropout of the sublayer's output, in [0, 1).

    Raises:
        ValueError: If position is neither.

    Source: Xiong et al. 2020, "On Layer Normalization in the Transformer", arXiv 2002.04745.
    """

    def __init__(self, norm: nn.Module, position: NormPosition, *, dropout: float = 0.0) -> None:
        super().__init__()
        if position not in get_args(NormPosition):
            raise ValueError(
                f"norm position is {position!r}, but it must be one of {get_args(NormPosition)}."
            )
        self.norm = norm
        self.is_pre = position == "pre"
        self.dropout = dropout

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sum, [..., d_model] like x."""
        change = sublayer(self.norm(x) if self.is_pre else x)
        total = x + F.dropout(change, self.dropout, self.training)
        if x.dtype == torch.float16:
            # Past 65504 the next norm would turn infinity into NaN.
            limit = torch.finfo(torch.float16).max
            total = total.clamp(-limit, limit).half()
        if self.is_pre:
            return total
        normed: Tensor = self.norm(total)
        return normed
