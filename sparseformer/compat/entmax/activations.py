"""sparsemax and entmax15 with the arguments that entmax.activations takes."""
# ruff: noqa: N803 - callers pass X by name

from typing import Literal, overload

from torch import Tensor, nn

from sparseformer import functional

Result = Tensor | tuple[Tensor, Tensor]


@overload
def sparsemax(
    X: Tensor, dim: int = -1, k: int | None = None, return_support_size: Literal[False] = False
) -> Tensor: ...
@overload
def sparsemax(
    X: Tensor, dim: int = -1, k: int | None = None, *, return_support_size: Literal[True]
) -> tuple[Tensor, Tensor]: ...
@overload
def sparsemax(
    X: Tensor, dim: int = -1, k: int | None = None, return_support_size: bool = False
) -> Result: ...
def sparsemax(
    X: Tensor, dim: int = -1, k: int | None = None, return_support_size: bool = False
) -> Result:
    """Compute `sparseformer.functional.sparsemax`.

    Args:
        X: scores, any shape, any floating dtype; -inf excludes an entry.
        dim: the dim that sums to 1.
        k: accepted and without effect: the result is exact for any support.
        return_support_size: also return how many probabilities are above 0.

    Returns:
        Probabilities of X's shape and dtype; with return_support_size also int64 counts of X's
        shape with size 1 along dim.

    Raises:
        ValueError: X holds NaN or +inf.
    """
    del k
    return _with_support_size(functional.sparsemax(X, dim), dim, return_support_size)


@overload
def entmax15(
    X: Tensor, dim: int = -1, k: int | None = None, return_support_size: Literal[False] = False
) -> Tensor: ...
@overload
def entmax15(
    X: Tensor, dim: int = -1, k: int | None = None, *, return_support_size: Literal[True]
) -> tuple[Tensor, Tensor]: ...
@overload
def entmax15(
    X: Tensor, dim: int = -1, k: int | None = None, return_support_size: bool = False
) -> Result: ...
def entmax15(
    X: Tensor, dim: int = -1, k: int | None = None, return_support_size: bool = False
) -> Result:
    """Compute `sparseformer.functional.entmax15`.

    Args:
        X: as for sparsemax.
        dim: as for sparsemax.
        k: as for sparsemax.
        return_support_size: as for sparsemax.

    Returns:
        As sparsemax.

    Raises:
        ValueError: X holds NaN or +inf.
    """
    del k
    return _with_support_size(functional.entmax15(X, dim), dim, return_support_size)


def _with_support_size(probs: Tensor, dim: int, return_support_size: bool) -> Result:
    if not return_support_size:
        return probs
    return probs, (probs > 0).sum(dim, keepdim=True)


class Sparsemax(nn.Module):
    """Module form of `sparsemax`."""

    def __init__(
        self, dim: int = -1, k: int | None = None, return_support_size: bool = False
    ) -> None:
        super().__init__()
        self.dim, self.k, self.return_support_size = dim, k, return_support_size

    def forward(self, X: Tensor) -> Result:
        return sparsemax(X, self.dim, self.k, self.return_support_size)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class Entmax15(Sparsemax):
    """Module form of `entmax15`."""

    def forward(self, X: Tensor) -> Result:
        return entmax15(X, self.dim, self.k, self.return_support_size)
