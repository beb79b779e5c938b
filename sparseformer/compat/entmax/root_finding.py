"""The maps of entmax.root_finding: entmax of any alpha, sparsemax, normmax and budget."""
# ruff: noqa: N803 - callers pass X by name

from torch import Tensor, nn

from sparseformer import functional
from sparseformer.compat.entmax.constrained import (
    BudgetFunction,
    NormmaxFunction,
    check_scores,
    per_row,
)


def entmax_bisect(
    X: Tensor,
    alpha: float | Tensor = 1.5,
    dim: int = -1,
    n_iter: int | None = 50,
    ensure_sum_one: bool = True,
) -> Tensor:
    """Compute `sparseformer.functional.entmax`, differentiable in X and in a tensor alpha.

    Args:
        X: scores, any shape, any floating dtype; -inf excludes an entry.
        alpha: finite, 1 (softmax) or more; a tensor broadcasts with X and has size 1 along dim.
        dim: the dim that sums to 1.
        n_iter: accepted and without effect: the threshold is exact to rounding.
        ensure_sum_one: accepted and without effect: rows always sum to 1.

    Returns:
        Probabilities of X's shape and dtype.

    Raises:
        ValueError: X holds NaN or +inf, or alpha is below 1, not finite or of a wrong shape.
    """
    del n_iter, ensure_sum_one
    return functional.entmax(X, alpha, dim)


def sparsemax_bisect(
    X: Tensor, dim: int = -1, n_iter: int | None = 50, ensure_sum_one: bool = True
) -> Tensor:
    """Compute `sparseformer.functional.sparsemax`.

    Args:
        X: as for entmax_bisect.
        dim: as for entmax_bisect.
        n_iter: as for entmax_bisect.
        ensure_sum_one: as for entmax_bisect.

    Returns:
        As entmax_bisect.

    Raises:
        ValueError: X holds NaN or +inf.
    """
    del n_iter, ensure_sum_one
    return functional.sparsemax(X, dim)


def normmax_bisect(
    X: Tensor, alpha: float | Tensor = 2, dim: int = -1, n_iter: int | None = 50
) -> Tensor:
    """Compute normmax: p = argmax_p <p, x> - |p|_alpha over the simplex.

    p_j is proportional to max(x_j - tau, 0) ** (1 / (alpha - 1)), tau such that the
    max(x_j - tau, 0) ** (alpha / (alpha - 1)) sum to 1; found in float64.

    Args:
        X: scores, as for entmax_bisect; differentiable.
        alpha: finite, above 1; a float, or a tensor as for entmax_bisect, without a gradient.
        dim: the dim that sums to 1.
        n_iter: accepted and without effect: tau is exact to rounding.

    Returns:
        Probabilities of X's shape and dtype; a row of nothing but -inf gives zeros.

    Raises:
        ValueError: X holds NaN or +inf, or alpha isn't above 1.

    Source:
        Blondel, Martins and Niculae 2020, "Learning with Fenchel-Young Losses".
    """
    del n_iter
    check_scores("normmax_bisect", X)
    rows = per_row("normmax_bisect", "alpha", alpha, X, dim, above=1.0)
    result: Tensor = NormmaxFunction.apply(X.movedim(dim, -1), rows)
    return result.movedim(-1, dim)


def budget_bisect(
    X: Tensor, budget: float | Tensor = 2, dim: int = -1, n_iter: int | None = 50
) -> Tensor:
    """Compute budget sparsemax: argmin_p |p - x|**2 with 0 <= p_j <= 1 and sum_j p_j = budget.

    p_j = clamp(x_j - tau, 0, 1); tau is found in float64.

    Args:
        X: scores, as for entmax_bisect; differentiable.
        budget: finite, 0 or more; a float, or a tensor as alpha, without a gradient. Where it is
            more than the number of scores above -inf, each of these gets 1.
        dim: the dim that sums to budget.
        n_iter: accepted and without effect: tau is exact to rounding.

    Returns:
        Shape and dtype of X.

    Raises:
        ValueError: X holds NaN or +inf, or budget is below 0.

    Source:
        Malaviya, Ferreira and Martins 2018, "Sparse and Constrained Attention for Neural Machine
        Translation", for the upper bounds.
    """
    del n_iter
    check_scores("budget_bisect", X)
    rows = per_row("budget_bisect", "budget", budget, X, dim, least=0.0)
    result: Tensor = BudgetFunction.apply(X.movedim(dim, -1), rows)
    return result.movedim(-1, dim)


class SparsemaxBisect(nn.Module):
    """Module form of `sparsemax_bisect`."""

    def __init__(self, dim: int = -1, n_iter: int | None = None) -> None:
        super().__init__()
        self.dim, self.n_iter = dim, n_iter

    def forward(self, X: Tensor) -> Tensor:
        return sparsemax_bisect(X, self.dim, self.n_iter)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class EntmaxBisect(nn.Module):
    """Module form of `entmax_bisect`; an nn.Parameter as alpha is learned with the module."""

    def __init__(self, alpha: float | Tensor = 1.5, dim: int = -1, n_iter: int | None = 50) -> None:
        super().__init__()
        self.alpha, self.dim, self.n_iter = alpha, dim, n_iter

    def forward(self, X: Tensor) -> Tensor:
        return entmax_bisect(X, self.alpha, self.dim, self.n_iter)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, dim={self.dim}"


class NormmaxBisect(nn.Module):
    """Module form of `normmax_bisect`."""

    def __init__(self, alpha: float | Tensor = 2, dim: int = -1, n_iter: int | None = 50) -> None:
        super().__init__()
        self.alpha, self.dim, self.n_iter = alpha, dim, n_iter

    def forward(self, X: Tensor) -> Tensor:
        return normmax_bisect(X, self.alpha, self.dim, self.n_iter)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, dim={self.dim}"


class BudgetBisect(nn.Module):
    """Module form of `budget_bisect`."""

    def __init__(self, budget: float | Tensor = 2, dim: int = -1, n_iter: int | None = 50) -> None:
        super().__init__()
        self.budget, self.dim, self.n_iter = budget, dim, n_iter

    def forward(self, X: Tensor) -> Tensor:
        return budget_bisect(X, self.budget, self.dim, self.n_iter)

    def extra_repr(self) -> str:
        return f"budget={self.budget}, dim={self.dim}"
