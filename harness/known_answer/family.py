"""Families: a target and its drafters, by name. `FAMILIES` is the registry; a family is added in one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.known_answer import markov
from harness.known_answer.base import Drafter, Target
from harness.known_answer.census import CensusTarget
from harness.known_answer.drafters import (
    dflash,
    eagle,
    eagle3,
    frozen_kv_mtp,
    medusa,
    mtp,
    mtp_hybrid,
    pairs,
    standalone,
)
from harness.known_answer.drafters.extract_hidden_states import ExtractHiddenStatesDrafter
from harness.known_answer.drafters.ngram import NgramDrafter
from harness.known_answer.hybrid import HybridTarget

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
WALK_VOCAB, LAW_VOCAB = 64, 16
WALK_ERRS = (0, 1, 3, 7, 12, 20, 29, 41)
"""Where on its cycle the drafters of a walk err: runs between errors of 0 to 21 right drafts."""
COIN_COLUMNS: Mapping[int, Mapping[int, float]] = {
    0: {15: 0.70, 12: 0.22, 0: 0.08},
    15: {12: 0.62, 0: 0.25, 15: 0.13},
    12: {0: 0.76, 15: 0.17, 12: 0.07},
}
COIN_ERRS = (15,)
OUTSIDE_DRAFT_VOCAB = 8
"""One token in so many is missing from the reduced draft vocabulary of EAGLE3; never id 0 or the last."""
WITHOUT_CHECKPOINT: Mapping[str, Callable[[Target], Drafter]] = {
    "ngram": NgramDrafter,
    "extract_hidden_states": ExtractHiddenStatesDrafter,
}
"""Drafters that any target has: they load nothing."""


@dataclass(frozen=True, slots=True)
class Family:
    """A target and its drafters by name; an MTP drafter is a whole checkpoint that holds its target as well."""

    name: str
    target: Target
    drafters: Mapping[str, Drafter]

    def drafter(self, name: str) -> Drafter:
        """One of `drafters`, or one that has no checkpoint."""
        return self.drafters[name] if name in self.drafters else WITHOUT_CHECKPOINT[name](self.target)

    def write(self, directory: Path) -> None:
        """Write `directory/target` and `directory/DRAFTER` for each drafter."""
        self.target.write(directory / "target")
        for name, drafter in self.drafters.items():
            drafter.write(directory / name)


def reduced_vocab(vocab_size: int) -> tuple[int, ...]:
    return tuple(token for token in range(vocab_size) if token % OUTSIDE_DRAFT_VOCAB != OUTSIDE_DRAFT_VOCAB // 2)


def walk(name: str, dtype: torch.dtype, *, perfect: bool = False, reaches_eos: bool = False, seed: int = 0) -> Family:
    """A deterministic walk over 63 tokens; with `reaches_eos` EOS follows the 32nd of them."""
    eos = markov.EOS_TOKEN_ID
    successors = markov.walk_successors(WALK_VOCAB, eos, seed)
    order = [successors[eos]]
    while len(order) < WALK_VOCAB - 1:
        order.append(successors[order[-1]])
    if reaches_eos:
        successors = markov.walk_successors(WALK_VOCAB, eos, seed, eos_after=order[31])
    law = markov.walk_law(successors, seed)
    errs_on = set() if perfect else {order[place] for place in WALK_ERRS}
    draft_vocab = range(WALK_VOCAB) if perfect else reduced_vocab(WALK_VOCAB)
    target = markov.MarkovTarget(law, eos_token_id=eos, dtype=dtype, seed=seed)
    host = markov.MarkovTarget(law, eos_token_id=eos, dtype=dtype, seed=seed, num_layers=2, style="mimo")
    drafters = {
        "standalone": standalone.markov(target, errs_on),
        "eagle": eagle.MarkovEagle(target, pairs.walk_pairs(target, errs_on)),
        "eagle3": eagle3.markov_eagle3(target, pairs.walk_pairs, errs_on, draft_vocab),
        "mtp": mtp.MarkovMtp(host, pairs.walk_pairs(host, errs_on)),
        "mtp3": mtp.MarkovMtp(host, pairs.walk_pairs(host, errs_on), num_layers=3),
        "medusa": medusa.MarkovMedusa(target, errs_on),
        "frozen_kv_mtp": frozen_kv_mtp.MarkovFrozen(target, pairs.walk_pairs(target, errs_on)),
        "dflash": dflash.MarkovDFlash(target, pairs.walk_pairs(target, errs_on), errs_on),
    }
    return Family(name, target, drafters)


def law(name: str, dtype: torch.dtype, *, perfect: bool = False, eos_probability: float = 0.0, seed: int = 0) -> Family:
    """A soft law over 16 tokens, for sampling and logprobs. Drafters err after a quarter of the tokens."""
    soft = markov.soft_law(LAW_VOCAB, markov.EOS_TOKEN_ID, seed, eos_probability)
    errs_on = set() if perfect else set(range(1, LAW_VOCAB, 4))
    return soft_family(name, dtype, soft, errs_on, perfect=perfect, seed=seed)


def coin(name: str, dtype: torch.dtype, *, seed: int = 0) -> Family:
    """A law over three tokens of 16: so few bins that goodness of fit needs few samples. One of the three is missing
    from the reduced draft vocabulary."""
    return soft_family(name, dtype, markov.coin_law(LAW_VOCAB, COIN_COLUMNS), set(COIN_ERRS), seed=seed)


def soft_family(
    name: str, dtype: torch.dtype, soft: torch.Tensor, errs_on: set[int], *, perfect: bool = False, seed: int = 0
) -> Family:
    """A Markov target with the law `soft` [16 next, 16 current] and its drafters."""
    eos = markov.EOS_TOKEN_ID
    draft_vocab = range(LAW_VOCAB) if perfect else reduced_vocab(LAW_VOCAB)
    target = markov.MarkovTarget(soft, eos_token_id=eos, dtype=dtype, seed=seed)
    host = markov.MarkovTarget(
        soft,
        eos_token_id=eos,
        dtype=dtype,
        seed=seed,
        num_layers=2,
        style="mimo",
        intermediate_size=LAW_VOCAB**2,
    )
    drafters = {
        "standalone": standalone.markov(target, errs_on, noise=0.0 if perfect else 0.25),
        "eagle": eagle.MarkovEagle(target, pairs.law_pairs(target, errs_on)),
        "eagle3": eagle3.markov_eagle3(target, pairs.law_pairs, errs_on, draft_vocab),
        "mtp": mtp.MarkovMtp(host, pairs.law_pairs(host, errs_on)),
        "medusa": medusa.MarkovMedusa(target, errs_on),
        "frozen_kv_mtp": frozen_kv_mtp.MarkovFrozen(target, pairs.law_pairs(target, errs_on)),
        "dflash": dflash.MarkovDFlash(target, pairs.law_pairs(target, errs_on), errs_on),
    }
    return Family(name, target, drafters)


def census(name: str, dtype: torch.dtype, *, perfect: bool = False, stutter: bool = False, seed: int = 0) -> Family:
    """Tokens that depend on the whole KV and on positions, in four alphabets of twelve. Drafters err after a sixth of
    the tokens. With `stutter` a token may follow itself."""
    target = CensusTarget(dtype=dtype, seed=seed, stutter=stutter)
    alphabets = target.alphabets
    errs_on = set() if perfect else {alphabet[place] for alphabet in alphabets.members for place in (2, 7)}
    # One token of each alphabet is missing, so that of every pair at least one can be drafted.
    outside = set() if perfect else {alphabet[4] for alphabet in alphabets.members}
    draft_vocab = [token for token in range(target.vocab_size) if token not in outside]
    followers = sum(len(alphabets.followers(token)) for token in range(target.vocab_size))
    host = CensusTarget(
        dtype=dtype, seed=seed, num_layers=2, style="mimo", intermediate_size=followers, stutter=stutter
    )
    drafters = {
        "standalone": standalone.census(target, errs_on),
        "eagle": eagle.CensusEagle(target, errs_on),
        "eagle3": eagle3.CensusEagle3(target, errs_on, draft_vocab),
        "mtp": mtp.CensusMtp(host, errs_on),
        "medusa": medusa.CensusMedusa(target, errs_on),
        "frozen_kv_mtp": frozen_kv_mtp.CensusFrozen(target, errs_on),
        "dflash": dflash.CensusDFlash(target, errs_on),
    }
    return Family(name, target, drafters)


def hybrid(name: str, dtype: torch.dtype, *, perfect: bool = False, seed: int = 0) -> Family:
    """A census whose tokens depend on a recurrent state and on the KV, in four alphabets of eight. Drafters err after a
    quarter of the tokens. Only drafters whose weights know a hybrid row are here."""
    target = HybridTarget(dtype=dtype, seed=seed)
    alphabets = target.alphabets
    errs_on = set() if perfect else {alphabet[place] for alphabet in alphabets.members for place in (2, 5)}
    followers = sum(len(alphabets.followers(token)) for token in range(target.vocab_size))
    host = HybridTarget(dtype=dtype, seed=seed, intermediate_size=followers)
    drafters = {
        "standalone": standalone.census(target, errs_on),
        "mtp": mtp_hybrid.HybridMtp(host, errs_on),
    }
    return Family(name, target, drafters)


FAMILIES: Mapping[str, Callable[[torch.dtype], Family]] = {
    "walk": lambda dtype: walk("walk", dtype),
    "walk-perfect": lambda dtype: walk("walk-perfect", dtype, perfect=True),
    "walk-eos": lambda dtype: walk("walk-eos", dtype, reaches_eos=True),
    "law": lambda dtype: law("law", dtype),
    "law-perfect": lambda dtype: law("law-perfect", dtype, perfect=True),
    "law-eos": lambda dtype: law("law-eos", dtype, eos_probability=0.02),
    "coin": lambda dtype: coin("coin", dtype),
    "census": lambda dtype: census("census", dtype),
    "census-perfect": lambda dtype: census("census-perfect", dtype, perfect=True),
    "census-stutter": lambda dtype: census("census-stutter", dtype, stutter=True),
    "hybrid": lambda dtype: hybrid("hybrid", dtype),
    "hybrid-perfect": lambda dtype: hybrid("hybrid-perfect", dtype, perfect=True),
}


def family(name: str, dtype: torch.dtype | str = torch.float32) -> Family:
    """Build a family by name, its weights rounded to `dtype`. Raises ValueError naming the unknown one."""
    if name not in FAMILIES:
        raise ValueError(f"family={name!r}: must be one of {', '.join(FAMILIES)}")
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
        dtype = DTYPES[dtype]
    return FAMILIES[name](dtype)


def build(directory: Path, names: Sequence[str] = (), dtype: torch.dtype | str = torch.float32) -> tuple[Path, ...]:
    """Write families (all of them when `names` is empty) as `directory/NAME/target`, `directory/NAME/eagle` and so on;
    returns the folders of the families. Raises ValueError naming an unknown family or dtype before anything is written.
    """
    built = [family(name, dtype) for name in names or FAMILIES]
    for one in built:
        one.write(directory / one.name)
    return tuple(directory / one.name for one in built)
