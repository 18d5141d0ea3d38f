"""The distillation loss over a large vocabulary, computed and differentiated a few rows at a time."""

import torch
from torch import Tensor

__all__ = ["distillation_loss"]

ROWS_AT_ONCE = 16
"""Rows whose float32 logits are in work together: a few megabytes, which stay in the processor's cache."""


def distillation_loss(guesses: Tensor, own: Tensor, own_rows: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of KL(own prediction || guess).

    Parameters
    ----------
    guesses : Tensor, shape (rows, vocabulary)
        Logits of the prompt tokens; the gradient flows to them.
    own : Tensor, shape (positions, vocabulary)
        Logits of the model itself; no gradient.
    own_rows : LongTensor, shape (rows,)
        The row of ``own`` that each guess imitates.
    weights : Tensor, shape (rows,)
        Weight of each row.

    Returns
    -------
    Tensor, scalar, float32 or wider
        Nats.

    Notes
    -----
    Ordinary autograd keeps several float32 tensors of all rows by the whole vocabulary and passes over each. The
    gradient, ``weight * (softmax(guess) - softmax(own))``, is at hand while the loss is computed, so only it is kept,
    in the model's dtype.
    """
    return _DistillationLoss.apply(guesses, own, own_rows, weights)


class _DistillationLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, guesses: Tensor, own: Tensor, own_rows: Tensor, weights: Tensor
    ) -> Tensor:
        work = torch.promote_types(guesses.dtype, torch.float32)
        gradient = torch.empty_like(guesses)
        total = torch.zeros((), dtype=work, device=guesses.device)
        for start in range(0, guesses.shape[0], ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            log_guess = torch.log_softmax(guesses[part].to(work), dim=-1)
            log_own = torch.log_softmax(own[own_rows[part]].to(work), dim=-1)
            share = log_own.exp()
            weight = weights[part, None].to(work)
            total += ((log_own - log_guess).mul_(share) * weight).sum()
            gradient[part] = log_guess.exp_().sub_(share).mul_(weight)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None
