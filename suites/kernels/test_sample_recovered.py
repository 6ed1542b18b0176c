"""sample_recovered: the kernel equals the reference; a rejected or unknown id never wins the race."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.base import Backend
from kernels.sample_recovered import launch, reference, sample_recovered
from suites.kernels.chains import chain
from suites.kernels.guard import DEVICE, compare
from suites.kernels.laws import TOLERANCE, points
from suites.kernels.rows import EDGE_VOCABS, VOCABS, offset_rows, probabilities
from suites.kernels.support import examples, generator, seeds, strided
from suites.registration import suite

suite(seconds=1.3, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")

Args = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]


def race(rows: int, k: int, vocab: int, seed: int, *, with_probs: bool = True) -> Args:
    """Rows of all kinds; some of the noise is 0, infinite or NaN."""
    drafts, q, p, *_ = chain(rows, k, vocab, seed, with_probs=with_probs)
    noise = torch.empty(rows, vocab).exponential_(generator=generator(seed + 5))
    wild = torch.rand(rows, vocab, generator=generator(seed + 6))
    for bound, value in ((0.03, torch.nan), (0.02, torch.inf), (0.01, 0.0)):
        noise[wild < bound] = value
    return drafts, q, p[:, :k].contiguous(), noise


def check_ids(args: Args, recovered: torch.Tensor) -> None:
    vocab = args[2].shape[2]
    assert ((recovered >= 0) & (recovered < vocab)).all()
    if vocab > 1:
        assert (recovered != args[0]).all()


@examples
@given(
    rows=st.integers(0, 3),
    k=st.integers(0, 4),
    vocab=st.sampled_from(VOCABS),
    seed=seeds,
    with_probs=st.booleans(),
    extra=st.integers(0, 3),
)
def test_equals_reference(rows: int, k: int, vocab: int, seed: int, with_probs: bool, extra: int) -> None:
    args = race(rows, k, vocab, seed, with_probs=with_probs)
    got, _ = compare(sample_recovered, *(None if one is None else strided(one, extra) for one in args))
    check_ids(args, got.cpu())


@pytest.mark.parametrize("vocab", EDGE_VOCABS)
def test_tile_edges(vocab: int) -> None:
    """The best is in the last lane, and lanes past it would win if they were let in."""
    drafts, q, p, noise = race(2, 2, vocab, vocab)
    noise = noise.nan_to_num(1.0, 1.0)
    p[0, 0] = 0.0
    p[0, 0, -1] = 1e-20
    drafts[0, 0] = -1
    noise[0, -1] = 1.0
    got, _ = compare(sample_recovered, drafts, q, p, strided(noise, 7))
    assert got[0, 0] == vocab - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    drafts, q, p, noise = race(3, 2, 40, 8)
    assert q is not None
    compare(sample_recovered, drafts, q.to(dtype), p.to(dtype), noise.double())


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf, -1.0])
def test_nothing_left_gives_the_lowest_other_id(value: float) -> None:
    p = torch.full((1, 3, 4), value)
    got, _ = compare(sample_recovered, torch.tensor([[0, 2, -1]]), p, p, torch.ones(1, 4))
    assert got.tolist() == [[1, 0, 0]]


def test_the_race_by_hand() -> None:
    """Residuals 0.3, 0, 0.1 over noise 3, 1, 0.9; of equals the lower id; p == q falls back to p."""
    p = torch.tensor([[[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.5, 0.25, 0.25]]])
    q = torch.tensor([[[0.2, 0.65, 0.15], [0.0, 1.0, 0.0], [0.5, 0.25, 0.25]]])
    noise = torch.tensor([[3.0, 1.0, 0.9]])
    got, _ = compare(sample_recovered, torch.tensor([[1, 1, 2]]), q, p, noise)
    assert got.tolist() == [[2, 2, 1]]
    got, _ = compare(sample_recovered, torch.tensor([[1, 1, 2]]), None, p, torch.ones(1, 3))
    assert got.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("draft", [-1, 3, 4])
def test_without_a_draft_q_is_not_looked_at(draft: int) -> None:
    p, q = torch.tensor([[[0.5, 0.3, 0.2]]]), torch.tensor([[[0.5, 0.1, 0.4]]])
    got, _ = compare(sample_recovered, torch.tensor([[draft]]), q, p, torch.ones(1, 3))
    assert got.tolist() == [[0]]


@pytest.mark.parametrize("with_probs", [True, False])
def test_an_id_without_noise_does_not_run(with_probs: bool) -> None:
    """Neither for the residual, nor, in the second place, for the fallback."""
    p = torch.tensor([[[0.1, 0.3, 0.25, 0.2, 0.15]] * 2])
    q = torch.tensor([[[1.0, 0.0, 0.0, 0.0, 0.0], [0.1, 0.3, 0.25, 0.2, 0.15]]])
    noise = torch.tensor([[1.0, torch.nan, 0.0, torch.inf, 9.0]])
    got, _ = compare(sample_recovered, torch.tensor([[0, 0]]), q if with_probs else None, p, noise)
    assert got.tolist() == [[4, 4]]


RACES = {"drawn": ((0.5, 0.3, 0.2), (0.3, 0.2, 0.5)), "chosen": ((0.4, 0.2, 0.4), None)}
"""p and q. Only id 2 can be rejected, and id 0 then has twice the mass of id 1."""


def law_of_race(name: str, backend: Backend, off: float = 1.0) -> list[float]:
    """The law of one place, computed and not estimated: acceptance by its formula, the race by integration. Where the
    other time falls at quantile u, id 0 wins up to the quantile 1 - (1 - u)^2: of degree two, so four Gauss nodes are
    exact. `off` is a factor on the mass of id 0."""
    p, q = RACES[name]
    times, weights = [], []
    nodes, parts = np.polynomial.legendre.leggauss(4)
    for node, part in zip((nodes + 1) / 2, parts / 2, strict=True):
        for quantile, share in points([1 - (1 - node) ** 2]):
            times.append([-math.log1p(-quantile) / off, -math.log1p(-node), 0.5])
            weights.append(part * share)
    rows = len(times)
    drafts, noise = torch.full((rows, 1), 2, device=DEVICE), torch.tensor(times, device=DEVICE, dtype=torch.double)
    laws = [None if law is None else torch.tensor(law, device=DEVICE).double().repeat(rows, 1, 1) for law in (q, p)]
    recovered = sample_recovered(drafts, laws[0], laws[1], noise, backend=backend)[:, 0].tolist()
    drawn = (0.0, 0.0, 1.0) if q is None else q
    accepted = [min(mass, mass_q) for mass, mass_q in zip(p, drawn, strict=True)]
    for token, weight in zip(recovered, weights, strict=True):
        accepted[token] += (drawn[2] - p[2]) * weight
    return accepted


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", RACES)
def test_the_race_leaves_the_targets_law(name: str, backend: Backend) -> None:
    """And is seen to leave another where one id's residual is 1% off."""
    assert law_of_race(name, backend) == pytest.approx(RACES[name][0], abs=TOLERANCE)
    assert law_of_race(name, backend, off=1.01) != pytest.approx(RACES[name][0], abs=100 * TOLERANCE)


def test_offsets_past_31_bits(device: torch.device) -> None:
    p = offset_rows(probabilities((3, 2, 8), 3, hostile=False).half(), device)
    noise = torch.empty(3, 8).exponential_(generator=generator(1)).to(device)
    args = (torch.tensor([[1, 5], [6, 0], [4, 4]], device=device), None, p, noise)
    assert torch.equal(launch(*args), reference(*args))


def test_says_what_does_not_fit() -> None:
    drafts, q, p, noise = race(2, 3, 10, 0)
    with pytest.raises(ValueError, match=r"noise\.shape=\[2, 9\]: must be \[2, 10\]"):
        sample_recovered(drafts, q, p, noise[:, 1:], backend="torch")
    with pytest.raises(ValueError, match=r"target_probs\.shape=\[2, 2, 10\]: must be \[2, 3, any\]"):
        sample_recovered(drafts, q, p[:, 1:], noise, backend="torch")
    with pytest.raises(ValueError, match="last dim must have stride 1"):
        sample_recovered(drafts, q, p.mT.contiguous().mT, noise, backend="triton")
