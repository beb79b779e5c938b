"""Public entmax, log_entmax, sparsemax and entmax15: what they compute, and checks of inputs."""

import math

from torch import Tensor

from sparseformer.kernels.common.backends import Backend, check_backend
from sparseformer.kernels.entmax.autograd import BACKENDS, map_rows
from sparseformer.kernels.entmax.checks import per_row, prepare_scores, restore, wide


def entmax(
    x: Tensor,
    alpha: float | Tensor = 1.5,
    dim: int = -1,
    *,
    temperature: float | Tensor = 1.0,
    backend: Backend = "auto",
) -> Tensor:
    """Map scores to probabilities that can be exactly zero.

    p = argmax_p <p, x> + H_alpha(p) over the simplex, H_alpha the Tsallis entropy:
    p_j = max(1 + (alpha - 1)(x_j - t), 0) ** (1 / (alpha - 1)) with t such that sum_j p_j = 1.
    alpha = 1 is softmax, 1.5 is entmax15, 2 is sparsemax; the larger alpha, the sparser p.

    The log of a sparse p is no loss: a target off the support costs infinitely much and sends no
    gradient. Train with `entmax_loss`; `log_entmax` is for the scores of a beam search.

    Args:
        x: Scores, any shape, any floating dtype. An entry of -inf is excluded: its probability and
            its gradient are exactly 0. A row of nothing but -inf gives zeros and zero gradients.
        alpha: Finite, 1 or more: a float, a 0-d tensor, or a tensor that broadcasts with x and has
            size 1 along dim; a tensor is differentiable. p is right to the dtype's rounding for
            any alpha; above 2 the gradient has no bound near the border of the support.
        dim: The dim that sums to 1.
        temperature: x is divided by it; above 0, a float or a tensor shaped as alpha.
        backend: "auto" takes Triton on a GPU, and on a CPU compiled C++ where a compiler is found;
            "pytorch", "cpp" and "triton" insist on one.

    Returns:
        Shape and dtype of x; fp16 and bf16 are computed in fp32.

    Raises:
        ValueError: x holds NaN or +inf, or alpha or temperature is outside its range or shape
            (values that lie on a GPU aren't checked); or the backend can't serve the call.

    Source:
        Peters, Niculae and Martins 2019, "Sparse Sequence-to-Sequence Models"; the gradient with
        respect to alpha: Correia, Niculae and Martins 2019, "Adaptively Sparse Transformers".
    """
    return _entmax("entmax", x, alpha, dim, temperature, backend)


def log_entmax(
    x: Tensor,
    alpha: float | Tensor = 1.5,
    dim: int = -1,
    *,
    temperature: float | Tensor = 1.0,
    backend: Backend = "auto",
) -> Tensor:
    """Return log p of p = entmax(x, alpha), and -inf where p is 0: the scores of a beam search.

    Whatever gradient comes in where p is 0 is ignored. On the support it is multiplied by 1 / p,
    which is finite but has no bound. As a loss, take `entmax_loss` instead.

    Args:
        x: Scores, as in `entmax`.
        alpha: As in `entmax`. A p too small for its precision (1e-38 in fp32) counts as 0, so for
            alpha = 1 `torch.log_softmax` sees further.
        dim: The dim over which p sums to 1.
        temperature: x is divided by it, as in `entmax`.
        backend: As in `entmax`.

    Returns:
        Shape and dtype of x; fp16 and bf16 are computed in fp32.

    Raises:
        ValueError: as `entmax` does.

    Source:
        Peters, Niculae and Martins 2019, "Sparse Sequence-to-Sequence Models".
    """
    name = "log_entmax"
    probs = _probabilities(name, wide(x), alpha, dim, temperature, backend)
    excluded = probs == 0
    log_probs = probs.masked_fill(excluded, 1.0).log().masked_fill(excluded, -math.inf)
    return restore(log_probs, x, dim)


def sparsemax(
    x: Tensor,
    dim: int = -1,
    *,
    temperature: float | Tensor = 1.0,
    backend: Backend = "auto",
) -> Tensor:
    """Project scores onto the simplex: p = argmin_p |p - x|**2, p_j = max(x_j - tau, 0).

    Args:
        x: Scores, as in `entmax`.
        dim: The dim that sums to 1.
        temperature: x is divided by it, as in `entmax`.
        backend: As in `entmax`.

    Returns:
        Shape and dtype of x.

    Raises:
        ValueError: x holds NaN or +inf, temperature is outside its range or shape, or the
            backend can't serve the call.

    Source:
        Martins and Astudillo 2016, "From Softmax to Sparsemax".
    """
    return _entmax("sparsemax", x, 2.0, dim, temperature, backend)


def entmax15(
    x: Tensor,
    dim: int = -1,
    *,
    temperature: float | Tensor = 1.0,
    backend: Backend = "auto",
) -> Tensor:
    """Map scores to p_j = max(x_j / 2 - tau, 0) ** 2: entmax with alpha = 1.5, without log or exp.

    Args:
        x: Scores, as in `entmax`.
        dim: The dim that sums to 1.
        temperature: x is divided by it, as in `entmax`.
        backend: As in `entmax`.

    Returns:
        Shape and dtype of x.

    Raises:
        ValueError: x holds NaN or +inf, temperature is outside its range or shape, or the
            backend can't serve the call.

    Source:
        Peters, Niculae and Martins 2019, "Sparse Sequence-to-Sequence Models".
    """
    return _entmax("entmax15", x, 1.5, dim, temperature, backend)


def _entmax(
    name: str,
    x: Tensor,
    alpha: float | Tensor,
    dim: int,
    temperature: float | Tensor,
    backend: Backend,
) -> Tensor:
    return restore(_probabilities(name, x, alpha, dim, temperature, backend), x, dim)


def _probabilities(
    name: str,
    x: Tensor,
    alpha: float | Tensor,
    dim: int,
    temperature: float | Tensor,
    backend: Backend,
) -> Tensor:
    """Return p with dim moved last; all that looks at values happens in `map_rows`."""
    check_backend(name, backend, BACKENDS)
    scores = prepare_scores(name, x, dim, temperature)
    if isinstance(alpha, Tensor):
        learned = per_row(name, "alpha", alpha, x, dim)
        return map_rows(scores, learned, 1.0, name, backend)
    alpha = float(alpha)
    if not 1.0 <= alpha < math.inf:
        raise ValueError(f"{name} needs a finite alpha of 1 or more, got {alpha}.")
    return map_rows(scores, None, alpha, name, backend)
