"""The meaning of every operation on a batch: a Python loop over a list of tensors, gradients included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jaggedtensor.tensor import JaggedTensor


def assert_same_as_loop(
    jagged: Callable[..., Any],
    loop: Callable[..., Any],
    batches: Sequence[JaggedTensor],
    dense: Sequence[Tensor] = (),
    *,
    rtol: float = 1e-9,
    atol: float = 1e-10,
) -> None:
    """Assert that an operation on batches does what a loop over lists of their sequences does.

    Args:
        jagged: called with the batches and the dense tensors; gives a JaggedTensor, a Tensor, or a tuple of them.
        loop: called with a list of tensors for each batch and the dense tensors; gives a list where `jagged` gives a
            JaggedTensor, a Tensor where it gives one, or a tuple of them.
        batches: may have slack, which must come back as 0, in results and in gradients.
        dense: further inputs, whose gradients are compared too.

    Raises:
        AssertionError: dtype, shape, a value, or a gradient of anything floating that is differentiable differs.
    """
    inputs = [_leaf(jt.values()) for jt in batches]
    dense_inputs = [_leaf(x) for x in dense]
    lists = [[_leaf(x) for x in jt.to_list()] for jt in batches]
    dense_of_loop = [_leaf(x) for x in dense]

    got = _as_tuple(jagged(*(jt.with_values(x) for jt, x in zip(batches, inputs, strict=True)), *dense_inputs))
    expected = _as_tuple(loop(*lists, *dense_of_loop))
    assert len(got) == len(expected), f"{len(got)} results, expected {len(expected)}"

    loss, loss_of_loop = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for result, wanted in zip(got, expected, strict=True):
        pairs = _pairs(result, wanted)
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol, equal_nan=True)
        if isinstance(result, JaggedTensor) and not any(_shares(result, x) for x in inputs):
            slack = result.values()[result.num_tokens :]
            assert not slack.any(), "slack rows of the result are not 0"
            if slack.requires_grad:  # whatever comes back through them must end there
                loss = loss + 3 * slack.double().sum()
        for i, (mine, theirs) in enumerate(pairs):
            if mine.requires_grad or theirs.requires_grad:
                weight = _weights(theirs, seed=i)
                loss = loss + (mine.nan_to_num(posinf=0, neginf=0) * weight).double().sum()
                loss_of_loop = loss_of_loop + (theirs.nan_to_num(posinf=0, neginf=0) * weight).double().sum()
    if not loss_of_loop.requires_grad and not loss.requires_grad:
        return
    if loss.requires_grad:  # a batch of no sequences may hang on nothing in the loop
        loss.backward()
    if loss_of_loop.requires_grad:
        loss_of_loop.backward()

    for number, (jt, leaf, xs) in enumerate(zip(batches, inputs, lists, strict=True)):
        if not leaf.requires_grad:
            continue
        grad = _grad(leaf)
        wanted_grad = torch.cat([_grad(x) for x in xs]) if xs else leaf.detach()[:0]
        tokens = jt.num_tokens
        name = f"the gradient of batch {number}"
        torch.testing.assert_close(grad[:tokens], wanted_grad, rtol=rtol, atol=atol, msg=partial(_named, name))
        assert torch.equal(grad[tokens:], torch.zeros_like(grad[tokens:])), f"{name} is not 0 in slack rows"
    for number, (leaf, other) in enumerate(zip(dense_inputs, dense_of_loop, strict=True)):
        if leaf.requires_grad:
            name = f"the gradient of dense input {number}"
            torch.testing.assert_close(_grad(leaf), _grad(other), rtol=rtol, atol=atol, msg=partial(_named, name))


def _named(name: str, message: str) -> str:
    return f"{name}: {message}"


def _leaf(x: Tensor) -> Tensor:
    """A fresh leaf with the same strides."""
    return x.detach().requires_grad_(x.is_floating_point())


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple) else (result,)


def _pairs(result: Any, wanted: Any) -> list[tuple[Tensor, Tensor]]:
    """What to compare with what; the structure is asserted here."""
    if isinstance(wanted, list):
        assert isinstance(result, JaggedTensor), f"{type(result).__name__}, expected a JaggedTensor"
        assert result.batch_size == len(wanted), f"{result.batch_size} sequences, expected {len(wanted)}"
        lengths = [len(x) for x in wanted]
        assert result.lengths().tolist() == lengths, f"lengths {result.lengths().tolist()}, expected {lengths}"
        return list(zip(result.to_list(), wanted, strict=True))
    assert isinstance(result, Tensor), f"{type(result).__name__}, expected a Tensor"
    return [(result, wanted)]


def _shares(result: JaggedTensor, values: Tensor) -> bool:
    """A view keeps the slack of its base as it is: nothing has been computed."""
    return result.values().untyped_storage().data_ptr() == values.untyped_storage().data_ptr()


def _weights(like: Tensor, seed: int) -> Tensor:
    """A different, fixed weight for every element, so that no gradient can be right by symmetry."""
    count = torch.arange(like.numel(), dtype=torch.float64).view(like.shape)
    return (torch.sin(count * 1.7 + seed) + 0.3).to(like.dtype).to(like.device)
