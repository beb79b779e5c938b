"""Public topk_softmax, topp_softmax, taylor_softmax and their logarithms; plain PyTorch anywhere.

There is no `backend` to choose: PyTorch's own sorting and softmax serve every device.
"""

from torch import Tensor

from sparseformer.kernels.entmax.checks import prepare_scores, restore, wide
from sparseformer.kernels.softmax_variants.autograd import checked_sizes, kept_softmax
from sparseformer.kernels.softmax_variants.reference import (
    taylor_log_probabilities,
    taylor_probabilities,
)


def topk_softmax(x: Tensor, k: int, dim: int = -1, *, temperature: float | Tensor = 1.0) -> Tensor:
    """Keep the k largest scores: p_j = exp(x_j) / sum_{i in top k} exp(x_i), exactly 0 elsewhere.

    The gradient is that of softmax on the kept set.

    Args:
        x: Scores, any shape, any floating dtype. An entry of -inf is excluded; a row of nothing
            but -inf gives zeros and zero gradients.
        k: 1 or more. Of equal scores at the border, those with the lowest index stay, so exactly
            k are kept. With at most k finite scores, also for k > x.size(dim), this is softmax.
        dim: The dim that sums to 1.
        temperature: x is divided by it; above 0, a float or a tensor with size 1 along dim.

    Returns:
        Shape and dtype of x; fp16 and bf16 are computed in fp32.

    Raises:
        ValueError: k is less than 1, x holds NaN or +inf, or temperature can't be used.

    Source:
        Su Jianlin 2020, sparse softmax, https://kexue.fm/archives/8046.
    """
    return _topk("topk_softmax", x, k, dim, temperature, log=False)


def log_topk_softmax(
    x: Tensor, k: int, dim: int = -1, *, temperature: float | Tensor = 1.0
) -> Tensor:
    """Return log p of p = topk_softmax(x, k): x_j - logsumexp over the k largest, -inf elsewhere.

    Whatever gradient comes in off the kept set is ignored.

    Args:
        x: Scores; x, k, dim and temperature as in `topk_softmax`.
        k: 1 or more.
        dim: The dim over which p sums to 1.
        temperature: x is divided by it.

    Returns:
        Shape and dtype of x; fp16 and bf16 are computed in fp32.

    Raises:
        ValueError: as `topk_softmax` does.

    Source:
        Su Jianlin 2020, sparse softmax, https://kexue.fm/archives/8046.
    """
    return _topk("log_topk_softmax", x, k, dim, temperature, log=True)


def topp_softmax(
    x: Tensor, p: float, dim: int = -1, *, temperature: float | Tensor = 1.0
) -> Tensor:
    """Keep the smallest set of largest scores with softmax mass >= p, and renormalise it.

    The gradient is that of softmax on the kept set.

    Args:
        x: Scores, as in `topk_softmax`.
        p: In (0, 1]; 1 is softmax. Of equal scores, those with the lowest index stay.
        dim: The dim that sums to 1.
        temperature: x is divided by it, before the mass is taken.

    Returns:
        Shape and dtype of x.

    Raises:
        ValueError: p is outside (0, 1], x holds NaN or +inf, or temperature can't be used.

    Source:
        Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration" (the nucleus).
    """
    return _topp("topp_softmax", x, p, dim, temperature, log=False)


def log_topp_softmax(
    x: Tensor, p: float, dim: int = -1, *, temperature: float | Tensor = 1.0
) -> Tensor:
    """Return the log of topp_softmax(x, p): x_j - logsumexp over the nucleus, -inf elsewhere.

    Whatever gradient comes in off the kept set is ignored.

    Args:
        x: Scores, as in `topk_softmax`.
        p: In (0, 1], as in `topp_softmax`.
        dim: The dim over which the probabilities sum to 1.
        temperature: x is divided by it, before the mass is taken.

    Returns:
        Shape and dtype of x; fp16 and bf16 are computed in fp32.

    Raises:
        ValueError: as `topp_softmax` does.

    Source:
        Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration" (the nucleus).
    """
    return _topp("log_topp_softmax", x, p, dim, temperature, log=True)


def taylor_softmax(
    x: Tensor, order: int = 2, dim: int = -1, *, temperature: float | Tensor = 1.0
) -> Tensor:
    """Replace exp by its Taylor polynomial: p_j = T(x_j) / sum_i T(x_i), T(x) = sum_i x**i / i!.

    Unlike softmax it isn't invariant to a shift of x, and p is positive wherever x is finite.

    Args:
        x: Scores, as in `topk_softmax`.
        order: The degree of T: even, 2 or more; a polynomial of odd degree has negative values.
        dim: The dim that sums to 1.
        temperature: x is divided by it.

    Returns:
        Shape and dtype of x.

    Raises:
        ValueError: order is odd or less than 2, x holds NaN or +inf, or temperature can't be used.

    Source:
        de Brebisson and Vincent 2016, "An Exploration of Softmax Alternatives Belonging to the
        Spherical Loss Family", arXiv 1511.05042.
    """
    scores = _taylor_scores("taylor_softmax", x, order, dim, temperature)
    sizes = checked_sizes(scores, "taylor_softmax")
    return restore(taylor_probabilities(scores, order, sizes), x, dim)


def log_taylor_softmax(
    x: Tensor, order: int = 2, dim: int = -1, *, temperature: float | Tensor = 1.0
) -> Tensor:
    """Return log p of p = taylor_softmax(x, order), and -inf where x is -inf.

    Args:
        x: Scores, as in `topk_softmax`.
        order: The degree of the polynomial: even, 2 or more.
        dim: The dim over which p sums to 1.
        temperature: x is divided by it.

    Returns:
        Shape and dtype of x; fp16 and bf16 are computed in fp32.

    Raises:
        ValueError: as `taylor_softmax` does.

    Source:
        de Brebisson and Vincent 2016, "An Exploration of Softmax Alternatives Belonging to the
        Spherical Loss Family", arXiv 1511.05042.
    """
    scores = _taylor_scores("log_taylor_softmax", x, order, dim, temperature)
    sizes = checked_sizes(scores, "log_taylor_softmax")
    return restore(taylor_log_probabilities(scores, order, sizes), x, dim)


def _topk(
    name: str, x: Tensor, k: int, dim: int, temperature: float | Tensor, *, log: bool
) -> Tensor:
    if k < 1:
        raise ValueError(f"{name} needs a k of 1 or more, got {k}.")
    scores = prepare_scores(name, x, dim, temperature)
    return restore(kept_softmax(scores, k, 1.0, log, name), x, dim)


def _topp(
    name: str, x: Tensor, p: float, dim: int, temperature: float | Tensor, *, log: bool
) -> Tensor:
    if not 0.0 < p <= 1.0:
        raise ValueError(f"{name} needs a p in (0, 1], got {p}.")
    scores = prepare_scores(name, x, dim, temperature)
    return restore(kept_softmax(scores, None, p, log, name), x, dim)


def _taylor_scores(
    name: str, x: Tensor, order: int, dim: int, temperature: float | Tensor
) -> Tensor:
    if order < 2 or order % 2:
        raise ValueError(f"{name} needs an even order of 2 or more, got {order}.")
    return wide(prepare_scores(name, x, dim, temperature))
