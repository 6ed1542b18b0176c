"""logprob_rank: ranks equal the reference, logprobs to one float32 ulp; one compilation serves all batch sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

from kernels.logprob_rank import KERNEL, launch, launch_arguments, logprob_rank, reference
from suites.kernels.guard import compare
from suites.kernels.rows import EDGE_VOCABS, VOCABS, logits, offset_rows
from suites.kernels.support import batches, examples, generator, seeds, strided
from suites.registration import suite

suite(seconds=0.8, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")

ULP = 2.0**-23


def tokens(rows: int, places: int, vocab: int, seed: int) -> torch.Tensor:
    return torch.randint(-1, vocab + 1, (rows, places), generator=generator(seed))


@examples
@given(rows=batches, places=st.integers(0, 3), vocab=st.sampled_from(VOCABS), seed=seeds, extra=st.integers(0, 3))
def test_equals_reference(rows: int, places: int, vocab: int, seed: int, extra: int) -> None:
    raw, ids = logits((rows, places, vocab), seed), tokens(rows, places, vocab, seed + 1)
    (logprobs, ranks), _ = compare(logprob_rank, strided(raw, extra), strided(ids, extra), rtol=ULP)
    used = (ids >= 0) & (ids < vocab)
    assert torch.equal(ranks.cpu() > 0, used)
    assert (ranks <= vocab).all()
    assert (logprobs.cpu()[~used] == -torch.inf).all()
    assert not logprobs.isnan().any()


@pytest.mark.parametrize("vocab", EDGE_VOCABS)
def test_tile_edges(vocab: int) -> None:
    raw = logits((2, 1, vocab), vocab, hostile=False)
    compare(logprob_rank, raw, torch.tensor([[vocab - 1], [0]]), rtol=ULP)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    compare(logprob_rank, logits((3, 2, 30), 4).to(dtype), tokens(3, 2, 30, 5), rtol=ULP)


def test_by_hand() -> None:
    """Equals do not count; NaN is least; the law is 1/2, 1/4, 1/4."""
    raw = torch.tensor([[[2.0, 1.0, 1.0, torch.nan]] * 5]) * 0.6931471805599453
    (logprobs, ranks), _ = compare(logprob_rank, raw, torch.tensor([[0, 1, 2, 3, -1]]), rtol=ULP)
    assert ranks.tolist() == [[1, 2, 2, 4, 0]]
    half = torch.tensor(0.5).log()
    torch.testing.assert_close(
        logprobs.cpu(), torch.stack([half, 2 * half, 2 * half, half - 99e99, half - 99e99])[None]
    )


def test_equals_log_softmax(device: torch.device) -> None:
    raw, ids = logits((4, 3, 200), 9, hostile=False).to(device), tokens(4, 3, 200, 1).clamp(0, 199).to(device)
    logprobs, ranks = launch(raw, ids)
    right = raw.double().log_softmax(-1).gather(-1, ids[:, :, None])[:, :, 0]
    torch.testing.assert_close(logprobs, right.float())
    assert torch.equal(ranks, (raw > raw.gather(-1, ids[:, :, None])).sum(-1) + 1)


def compilations(places: int) -> int:
    """How many variants Triton would compile for batches of 1 to 64; what it does before it compiles needs no GPU."""
    function = KERNEL.variants[0].function
    if not isinstance(function, JITFunction):
        function = JITFunction(function.fn, **function.kwargs)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(function.signature, function.params, backend)
    keys = set()
    for rows in range(1, 65):
        raw, ids = torch.zeros(rows, places, 1000), torch.zeros(rows, places, dtype=torch.long)
        arguments = launch_arguments(raw, ids, torch.zeros(rows, places), torch.zeros(rows, places, dtype=torch.long))
        _, specialization, options = bind(*arguments, BLOCK=1024)
        keys.add(compute_cache_key({}, specialization, options))
    return len(keys)


@pytest.mark.parametrize("places", [1, 5])
def test_batch_sizes_share_a_compilation(places: int) -> None:
    assert compilations(places) == 1


def test_offsets_past_31_bits(device: torch.device) -> None:
    raw = offset_rows(logits((3, 1, 8), 3, hostile=False).half(), device)
    ids = torch.tensor([[3], [4], [6]], device=device)
    (logprobs, ranks), (right, right_ranks) = launch(raw, ids), reference(raw, ids)
    torch.testing.assert_close(logprobs, right, rtol=ULP, atol=0)
    assert torch.equal(ranks, right_ranks)


def test_says_what_does_not_fit() -> None:
    raw = logits((2, 1, 10), 0)
    with pytest.raises(ValueError, match=r"token_ids\.shape=\[3, 1\]: must be \[2, 1\]"):
        logprob_rank(raw, tokens(3, 1, 10, 0), backend="torch")
    with pytest.raises(ValueError, match=r"token_ids\.dtype=torch\.int32"):
        logprob_rank(raw, tokens(2, 1, 10, 0).int(), backend="torch")
    with pytest.raises(ValueError, match="must not be empty"):
        logprob_rank(raw[..., :0], tokens(2, 1, 10, 0), backend="torch")
