"""Rows that are misaligned, stale, foreign or of the wrong layer change the acceptance: each fault is planted here."""

from __future__ import annotations

import pytest
import torch

from harness.known_answer.census import LAG
from suites.known_answer.support import dense, dense_accept_lens
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=4.5, stage="cpu", needs="cpu")

LAST_ROW_FAULTS = {
    "shifted back by one": lambda rows: torch.cat([rows[:1], rows[:-1]]),
    "reversed": lambda rows: rows.flip(0),
    "last row is the one before": lambda rows: torch.cat([rows[:-1], rows[-2:-1]]),
    "zero": torch.zeros_like,
}
HISTORY_FAULTS = {
    "shifted forth by one": lambda rows: torch.cat([rows[1:], rows[-1:]]),
    "all but the last reversed": lambda rows: torch.cat([rows[:-1].flip(0), rows[-1:]]),
    "all rows are the last one": lambda rows: rows[-1:].expand_as(rows),
}
"""The last row is right: only drafters that read their whole KV can tell."""
CASES = [(family, fault) for family in ("walk", "census") for fault in LAST_ROW_FAULTS]
CASES += [("census", fault) for fault in HISTORY_FAULTS]
ROW_CASES = [(*case, name) for case in CASES for name in ("eagle", "eagle3", "mtp", "dflash")]
for last_row_reader in ("medusa", "frozen_kv_mtp"):
    ROW_CASES += [(*case, last_row_reader) for case in CASES if case[1] in LAST_ROW_FAULTS]
DRAFTERS = [
    (family, name) for family in ("walk", "census") for name in ("eagle", "eagle3", "mtp", "frozen_kv_mtp", "dflash")
]


@pytest.mark.parametrize(("family", "fault", "name"), tiered(ROW_CASES, *(c for c in ROW_CASES if c[0] == "census")))
def test_a_wrong_row_changes_accept_lens(families, family, name, fault):
    built = families(family, "float32").drafters[name]
    prompt = built.target.prompt(4, seed=2, owner=1)
    change = (LAST_ROW_FAULTS | HISTORY_FAULTS)[fault]
    wrong = dense_accept_lens(built, prompt, 9, 3, fault=change)
    right = built.accept_lens(prompt, 9, 3)
    assert wrong != right
    assert sum(wrong) / len(wrong) < sum(right) / len(right)


@pytest.mark.parametrize(("family", "name"), DRAFTERS)
def test_the_embedding_matters_too(families, family, name):
    """Embeddings one token late: row j with t[j] instead of t[j+1]."""
    built = families(family, "float32").drafters[name]
    prompt = built.target.prompt(4, seed=2, owner=1)
    assert dense_accept_lens(built, prompt, 12, 3, late=True) != built.accept_lens(prompt, 12, 3)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp", "dflash"])
def test_another_requests_row_in_the_history_matters(families, name):
    """Census drafters read their whole KV: one foreign row a few positions back is enough."""
    built = families("census-perfect", "float32").drafters[name]
    witness = dense(built)
    prompt = built.target.prompt(30, seed=2, owner=1)
    foreign = witness.features(built.target.prompt(30, seed=2, owner=3))
    wrong = 0
    for end in range(14, 30, 2):
        tokens = (*prompt[:end], built.target.next_token(prompt[:end]))
        features = witness.features(tokens[:-1])
        features[end - LAG] = foreign[end - LAG]
        wrong += witness.draft(tokens, 1, features) != built.draft(tokens, 1)
    assert wrong >= 2


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp"])
def test_draft_rows_that_were_never_recomputed_are_noticed(families, name):
    """Accepted tokens keep the rows that the drafter made itself, as when draft KV is not refreshed after verification.

    Text stays right and the fed tokens are the right ones; only the mark tells."""
    built = families("census-perfect", "float32").drafters[name]
    witness = dense(built)
    tokens = built.target.prompt(12, seed=6, owner=2)
    tokens += built.target.greedy(tokens, 8)
    kept = witness.features(tokens[:-1])
    for row in range(8, len(kept)):
        ids = torch.tensor(tokens[1 : row + 1])
        kept[row] = witness.step(0, witness.embed[ids], kept[:row])[0][-1]
    assert witness.draft(tokens, 1) == built.draft(tokens, 1) == (built.target.next_token(tokens),)
    assert witness.draft(tokens, 1, kept) == (built.target.eos_token_id,)


def test_a_wrong_position_changes_the_drafts_of_a_census_drafter(families):
    """A draft KV with one row too many (positions run ahead, a rejected row stays) is not the same."""
    for name in ("eagle", "eagle3", "mtp"):
        built = families("census-perfect", "float32").drafters[name]
        witness = dense(built)
        prompt = built.target.prompt(30, seed=8, owner=0)
        differ = 0
        for end in range(12, 28, 2):
            tokens = (*prompt[:end], built.target.next_token(prompt[:end]))
            features = witness.features(tokens[:-1])
            stale = torch.cat([features[:-1], features[-2:-1], features[-1:]])
            differ += witness.draft((*tokens[:-1], tokens[-2], tokens[-1]), 1, stale) != built.draft(tokens, 1)
        assert differ >= 2


def test_each_mtp_layer_runs_at_its_own_step(families):
    built = families("walk-perfect", "float32").drafters["mtp3"]
    prompt = built.target.prompt(5, seed=3)
    for order in ((0, 0, 0), (0, 1, 1), (2, 1, 0)):
        wrong = dense(built)
        true_step = wrong.step
        wrong.step = lambda layer, *rows, order=order, step=true_step: step(order[layer], *rows)
        assert dense_accept_lens(built, prompt, 12, 4, witness=wrong) != built.accept_lens(prompt, 12, 4)


@pytest.mark.parametrize("ids", [(0, 0, 2), (1, 0, 2), (0, 2, 1), (1, 2, 3)])
@pytest.mark.parametrize("family", ["walk", "census"])
def test_dflash_needs_each_target_layer_in_its_place(families, family, ids):
    built = families(family, "float32").drafters["dflash"]
    wrong = dense(built)
    wrong.config = wrong.config | {"dflash_config": wrong.config["dflash_config"] | {"target_layer_ids": list(ids)}}
    prompt = built.target.prompt(5, seed=3, owner=2)
    assert dense_accept_lens(built, prompt, 8, 3, witness=wrong) != built.accept_lens(prompt, 8, 3)


def test_a_census_block_must_not_be_causal(families):
    built = families("census", "float32").drafters["dflash"]
    wrong = dense(built)
    wrong.causal = True
    prompt = built.target.prompt(5, seed=3, owner=2)
    for k in (1, 3):
        assert dense_accept_lens(built, prompt, 12, k, witness=wrong) != built.accept_lens(prompt, 12, k)


@pytest.mark.parametrize("ids", [(1, 1, 3), (2, 1, 3), (1, 3, 2), (0, 1, 2), (2, 3, 4)])
@pytest.mark.parametrize("family", ["walk", "census"])
def test_eagle3_needs_each_auxiliary_layer_in_its_place(families, family, ids):
    built = families(family, "float32").drafters["eagle3"]
    wrong = dense(built)
    wrong.config = wrong.config | {"eagle_aux_hidden_state_layer_ids": list(ids)}
    prompt = built.target.prompt(5, seed=3, owner=2)
    assert dense_accept_lens(built, prompt, 8, 3, witness=wrong) != built.accept_lens(prompt, 8, 3)


def test_eagle3_needs_its_vocabulary_map(families):
    for family in ("walk", "law", "census"):
        built = families(family, "float32").drafters["eagle3"]
        wrong = dense(built)
        wrong.d2t = None
        prompt = built.target.prompt(5, seed=3, owner=2)
        assert dense_accept_lens(built, prompt, 16, 3, witness=wrong) != built.accept_lens(prompt, 16, 3)


def early(kv):
    return torch.cat([kv[:1], kv[:-1]])


KV_FAULTS = {
    "everything one position early": lambda keys, values: (early(keys), early(values)),
    "values one position early": lambda keys, values: (keys, early(values)),
    "the last never written": lambda keys, values: (keys, torch.cat([values[:-1], torch.zeros_like(values[-1:])])),
    "the last alone written": lambda keys, values: (keys, torch.cat([torch.zeros_like(values[:-1]), values[-1:]])),
    "values reversed but the last": lambda keys, values: (keys, torch.cat([values[:-1].flip(0), values[-1:]])),
}
MARKOV_KV_FAULTS = list(KV_FAULTS)[:3]
"""With a Markov target it reads the last position alone."""
CENSUS_KV_FAULTS = [*list(KV_FAULTS)[1::2], "values reversed but the last"]
KV_CASES = [(family, fault) for family in ("walk", "law") for fault in MARKOV_KV_FAULTS]
KV_CASES += [("census", fault) for fault in CENSUS_KV_FAULTS]


@pytest.mark.parametrize(("family", "fault"), KV_CASES)
def test_a_frozen_drafter_reads_the_targets_kv(families, family, fault):
    """The row and the token are right, and the KV is not."""
    built = families(family, "float32").drafters["frozen_kv_mtp"]
    witness = dense(built)
    prompt = built.target.prompt(24, seed=2, owner=1)
    differ = 0
    for end in range(8, 24, 2):
        tokens = (*prompt[:end], built.target.next_token(prompt[:end]))
        rows, kv = witness.features(tokens[:-1]), witness.target_kv(tokens[:-1])
        assert witness.recur(tokens, 3, rows, kv) == built.draft(tokens, 3)
        spoilt = [KV_FAULTS[fault](*layer) for layer in kv]
        differ += witness.recur(tokens, 3, rows, spoilt) != built.draft(tokens, 3)
    assert differ >= 3


def test_a_census_assistant_reads_its_own_layer_of_the_target(families):
    built = families("census", "float32").drafters["frozen_kv_mtp"]
    wrong = dense(built)
    wrong.config = wrong.config | {"target_kv_layer_ids": [2]}
    prompt = built.target.prompt(5, seed=3, owner=2)
    assert dense_accept_lens(built, prompt, 8, 3, witness=wrong) != built.accept_lens(prompt, 8, 3)
