"""Public entmax, sparsemax and entmax15: what they compute, and checks of what they are given."""

import math

from torch import Tensor

from sparseformer.kernels.entmax.autograd import EntmaxFunction
from sparseformer.kernels.entmax.checks import per_row, prepare_scores, restore


def entmax(
    x: Tensor, alpha: float | Tensor = 1.5, dim: int = -1, *, temperature: float | Tensor = 1.0
) -> Tensor:
    """Map scores to probabilities that can be exactly zero.

    p = argmax_p <p, x> + H_alpha(p) over the simplex, H_alpha the Tsallis entropy:
    p_j = max(1 + (alpha - 1)(x_j - t), 0) ** (1 / (alpha - 1)) with t such that sum_j p_j = 1.
    alpha = 1 is softmax, 1.5 is entmax15, 2 is sparsemax; the larger alpha, the sparser p.

    Args:
        x: Scores, any shape, any floating dtype. An entry of -inf is excluded: its probability and
            its gradient are exactly 0. A row of nothing but -inf gives zeros and zero gradients.
        alpha: Finite, 1 or more: a float, a 0-d tensor, or a tensor that broadcasts with x and has
            size 1 along dim; a tensor is differentiable. p is right to the dtype's rounding for
            any alpha; above 2 the gradient has no bound near the border of the support.
        dim: The dim that sums to 1.
        temperature: x is divided by it; above 0, a float or a tensor shaped as alpha.

    Returns:
        Shape and dtype of x; fp16 and bf16 are computed in fp32.

    Raises:
        ValueError: x holds NaN or +inf, or alpha or temperature is outside its range or shape.
            Values that lie on a GPU aren't checked.

    Source:
        Peters, Niculae and Martins 2019, "Sparse Sequence-to-Sequence Models"; the gradient with
        respect to alpha: Correia, Niculae and Martins 2019, "Adaptively Sparse Transformers".
    """
    return _entmax("entmax", x, alpha, dim, temperature)


def sparsemax(x: Tensor, dim: int = -1, *, temperature: float | Tensor = 1.0) -> Tensor:
    """Project scores onto the simplex: p = argmin_p |p - x|**2, p_j = max(x_j - tau, 0).

    Args:
        x: Scores, as in `entmax`.
        dim: The dim that sums to 1.
        temperature: x is divided by it, as in `entmax`.

    Returns:
        Shape and dtype of x.

    Raises:
        ValueError: x holds NaN or +inf, or temperature is outside its range or shape.

    Source:
        Martins and Astudillo 2016, "From Softmax to Sparsemax".
    """
    return _entmax("sparsemax", x, 2.0, dim, temperature)


def entmax15(x: Tensor, dim: int = -1, *, temperature: float | Tensor = 1.0) -> Tensor:
    """Map scores to p_j = max(x_j / 2 - tau, 0) ** 2: entmax with alpha = 1.5, without log or exp.

    Args:
        x: Scores, as in `entmax`.
        dim: The dim that sums to 1.
        temperature: x is divided by it, as in `entmax`.

    Returns:
        Shape and dtype of x.

    Raises:
        ValueError: x holds NaN or +inf, or temperature is outside its range or shape.

    Source:
        Peters, Niculae and Martins 2019, "Sparse Sequence-to-Sequence Models".
    """
    return _entmax("entmax15", x, 1.5, dim, temperature)


def _entmax(
    name: str, x: Tensor, alpha: float | Tensor, dim: int, temperature: float | Tensor
) -> Tensor:
    scores = prepare_scores(name, x, dim, temperature)
    if isinstance(alpha, Tensor):
        alpha = per_row(name, "alpha", alpha, x, dim, least=1.0)
    else:
        alpha = float(alpha)
        if not 1.0 <= alpha < math.inf:
            raise ValueError(f"{name} needs a finite alpha of 1 or more, got {alpha}.")
    return restore(EntmaxFunction.apply(scores, alpha), x, dim)
