"""One door to the implementations of entmax on rows: plain PyTorch, compiled C++, or Triton."""

from torch import Tensor

from sparseformer.kernels.common.backends import Chosen
from sparseformer.kernels.entmax import gradient, reference

Alpha = float | Tensor


def entmax_rows(scores: Tensor, alpha: Alpha, backend: Chosen = "pytorch") -> Tensor:
    """Return p of every row.

    Args:
        scores: [..., n]; -inf excludes an entry. fp32 or float64, and with Triton fp16 or bf16.
        alpha: 1 or more; a float, or a tensor broadcastable to [..., 1].
        backend: as `choose_backend` returned it.

    Returns:
        Shape and dtype of scores; zeros for a row without a finite score.
    """
    if backend == "triton":
        from sparseformer.kernels.entmax.forward import entmax_forward

        flat = scores.reshape(-1, scores.size(-1))
        return entmax_forward(flat, flat_alpha(alpha, scores)).view(scores.shape)
    if backend == "cpp":
        from sparseformer.kernels.entmax.native import solve_rows

        return solve_rows(scores, alpha).probs
    return reference.entmax_rows(scores, alpha)


def solve_rows(scores: Tensor, alpha: Alpha, backend: Chosen = "pytorch") -> reference.SolvedRows:
    """Return p of every row and what to compute it again from; for the CPU implementations."""
    if backend == "cpp":
        from sparseformer.kernels.entmax import native

        return native.solve_rows(scores, alpha)
    return reference.solve_rows(scores, alpha)


def entmax_gradients(
    probs: Tensor,
    grad: Tensor,
    alpha: Alpha,
    want_scores: bool,
    want_alpha: bool,
    backend: Chosen = "pytorch",
) -> tuple[Tensor | None, Tensor | None]:
    """Return d scores, [..., n] in the dtype of probs, and d alpha, one per row, [..., 1]."""
    if backend == "triton":
        from sparseformer.kernels.entmax.backward import entmax_backward

        length = probs.size(-1)
        d_scores, d_alpha = entmax_backward(
            probs.reshape(-1, length),
            grad.reshape(-1, length),
            flat_alpha(alpha, probs),
            want_scores,
            want_alpha,
        )
        return (
            None if d_scores is None else d_scores.view(probs.shape),
            None if d_alpha is None else d_alpha.view(*probs.shape[:-1], 1),
        )
    if backend == "cpp":
        from sparseformer.kernels.entmax.native import gradients

        return gradients(probs, grad, alpha, want_scores, want_alpha)
    return gradient.gradients(probs, grad, alpha, want_scores, want_alpha)


def flat_alpha(alpha: Alpha, scores: Tensor) -> Alpha:
    """Return a float, a tensor [1] for one alpha of all rows, or one alpha for each row, [R]."""
    if not isinstance(alpha, Tensor):
        return alpha
    if alpha.numel() == 1:
        return alpha.reshape(1)
    return alpha.expand(*scores.shape[:-1], 1).reshape(-1)
