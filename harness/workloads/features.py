"""Everything that can be asked of an engine beside a drafter: the columns of the matrix drafter x feature.

Each feature is asked for by one request with a plain neighbour, and says what shows that it was heeded: an engine that
takes a feature and ignores it is as wrong as one that crashes on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.contract import Action, Completion, Request, Run, SamplingParams
from harness.workloads.known import vocabulary
from harness.workloads.vocabulary import Vocabulary

NEW_TOKENS = 8
ASKS, NEIGHBOUR = "asks", "neighbour"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of the request that asked; `plain` is what its target would have said without the feature."""

    run: Run
    plain: tuple[int, ...]
    words: Vocabulary

    @property
    def done(self) -> Completion:
        return self.run.of(ASKS)

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.done.token_ids


Fields = Mapping[str, Any] | Callable[[tuple[int, ...], Vocabulary], Mapping[str, Any]]
"""Fields as they are, or made from what the target would say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """`sampling` and `request` are fields of the request, `setup` those of the engine, `claim` the name under which an
    engine claims it (None: every engine must take it or decline). `heeded` judges the outcome."""

    name: str
    sampling: Fields = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)
    setup: Mapping[str, Any] = field(default_factory=dict)
    actions: tuple[Action, ...] = ()
    family: str = "law"
    claim: str | None = None
    heeded: Callable[[Outcome], bool] = lambda _outcome: True

    @property
    def words(self) -> Vocabulary:
        return vocabulary(self.family)

    @property
    def prompt(self) -> tuple[int, ...]:
        """Five tokens; for a target that says EOS, one that says it soon."""
        words = self.words
        for token in words.ordinary if self.family.endswith("eos") else ():
            if words.eos_token_id in words.continue_((token,), NEW_TOKENS - 2):
                return (token,)
        return words.prompt(5, 3)

    @property
    def plain(self) -> tuple[int, ...]:
        return self.words.continue_(self.prompt, NEW_TOKENS)

    def requests(self) -> tuple[Request, Request]:
        fields = self.sampling(self.plain, self.words) if callable(self.sampling) else self.sampling
        sampling = SamplingParams(**{"max_new_tokens": NEW_TOKENS, **fields})
        asks = Request(request_id=ASKS, prompt_token_ids=self.prompt, sampling=sampling, **self.request)
        other = Request(request_id=NEIGHBOUR, prompt_token_ids=self.words.prompt(3, 4))
        return asks, other


def _sampling(name: str, heeded: Callable[[Outcome], bool], fields: Fields, family: str = "law") -> Feature:
    return Feature(name=name, claim=name, sampling=fields, heeded=heeded, family=family)


def _hot(**fields: Any) -> dict[str, Any]:
    """Hot enough that nothing but the filter under test brings the likeliest tokens back."""
    return {"temperature": 2.0, "seed": 5, **fields}


def _other(outcome: Outcome) -> bool:
    return outcome.tokens != outcome.plain


def _same(outcome: Outcome) -> bool:
    return outcome.tokens == outcome.plain


SAMPLING = (
    _sampling("temperature", _other, _hot()),
    _sampling("top_k", _same, _hot(top_k=1)),
    _sampling("top_p", _same, {"temperature": 1.0, "seed": 5, "top_p": 1e-4}),
    _sampling("min_p", _same, {"temperature": 1.0, "seed": 5, "min_p": 0.9999}),
    _sampling("seed", _other, _hot(seed=6)),
    _sampling("repetition_penalty", _other, {"repetition_penalty": 0.01}),
    _sampling("presence_penalty", _other, {"presence_penalty": -2.0}),
    _sampling("frequency_penalty", _other, {"frequency_penalty": -2.0}),
    _sampling("logit_bias", lambda got: set(got.tokens) == {3}, {"logit_bias": ((3, 100.0),)}),
    _sampling("bad_words", _other, lambda plain, _words: {"bad_words": (plain[1:2],)}),
    _sampling(
        "allowed_token_ids",
        lambda got: set(got.tokens) <= {3, 5, 7},
        {"allowed_token_ids": (3, 5, 7)},
    ),
    _sampling(
        "min_new_tokens",
        lambda got: len(got.tokens) >= 4,
        lambda plain, _words: {"min_new_tokens": 4, "stop_token_ids": (plain[1],)},
    ),
    _sampling(
        "stop_token_ids",
        lambda got: got.tokens == got.plain[:3] and got.done.finish_reason == "stop",
        lambda plain, _words: {"stop_token_ids": (plain[2],)},
    ),
    _sampling("ignore_eos", lambda got: len(got.tokens) == NEW_TOKENS, {"ignore_eos": True}, family="walk-eos"),
    _sampling("logprobs", lambda got: len(got.done.logprobs or ()) == len(got.tokens), {"logprobs": 2}),
    _sampling(
        "prompt_logprobs",
        lambda got: len(got.done.prompt_logprobs or ()) == len(got.done.prompt_token_ids),
        {"prompt_logprobs": 2},
    ),
    _sampling(
        "stop",
        lambda got: got.tokens == got.plain[:4] and got.done.finish_reason == "stop",
        lambda plain, words: {"stop": (words.text(plain[2:4]),)},
        family="walk",  # transformers wants letters in a vocabulary that stop strings are spelt in
    ),
    _sampling(
        "json_schema",
        lambda got: (got.done.text or "x").lstrip("-").isdigit(),
        {"json_schema": '{"type": "integer"}'},
        family="walk",
    ),
    _sampling("regex", lambda got: (got.done.text or "").isdigit(), {"regex": "[0-9]{3}"}, family="walk"),
    _sampling("n", lambda got: got.run.of(ASKS, 1).token_ids == got.plain, _hot(top_k=1, n=2)),
    _sampling("greedy_n", lambda got: got.run.of(ASKS, 1).token_ids == got.plain, {"n": 2}),
)
REQUEST = (
    Feature(
        name="return_hidden_states",
        claim="return_hidden_states",
        request={"return_hidden_states": True},
        heeded=lambda got: got.done.hidden_states is not None,
    ),
    Feature(
        name="pooled_hidden",
        claim="pooled_hidden",
        request={"pooled_hidden": "both"},
        heeded=lambda got: got.done.pooled_hidden is not None,
    ),
    Feature(
        name="num_speculative_tokens",
        claim="num_speculative_tokens",
        request={"num_speculative_tokens": 1},
        heeded=lambda got: max(got.done.draft_lens or (0,)) <= 1,
    ),
    Feature(
        name="abort_step",
        claim="abort_step",
        request={"abort_step": 2},
        heeded=lambda got: got.done.finish_reason == "abort",
    ),
)
ACTIONS = tuple(
    Feature(
        name=" + ".join(dict.fromkeys(action.name for action in actions)),
        claim=actions[0].name,
        actions=actions,
        heeded=_same,
    )
    for actions in (
        (Action(step=1, name="pause"), Action(step=3, name="resume")),
        (Action(step=2, name="preempt", value=f"{ASKS}#0"),),
        (Action(step=2, name="reset_prefix_cache"),),
        (Action(step=2, name="sleep"), Action(step=4, name="wake")),
        (Action(step=2, name="reload_target"),),
        (Action(step=2, name="reload_drafter"),),
        (Action(step=1, name="set_num_steps", value=0), Action(step=3, name="set_num_steps", value=1)),
    )
)
SETUPS = tuple(
    Feature(name=name, setup=setup, heeded=_same)
    for name, setup in (
        ("overlap", {"overlap": True}),
        ("batch_buckets", {"batch_buckets": (4, 8)}),
        ("chunked prefill", {"chunk_size": 2}),
        ("page_size 1", {"page_size": 1}),
        ("no prefix_cache", {"prefix_cache": False}),
        ("max_running 1", {"max_running": 1}),
        ("k = 1", {"k": 1}),
        ("k = 7", {"k": 7}),
        ("float64", {"dtype": "float64"}),
        ("bfloat16", {"dtype": "bfloat16"}),
    )
)
FEATURES = {feature.name: feature for feature in (*SAMPLING, *REQUEST, *ACTIONS, *SETUPS)}
