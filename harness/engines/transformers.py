"""transformers, in a worker process, in the harness's own environment or in one of its own.

Black box: `generate`, plain (an independent baseline), assisted by a draft model, or with prompt lookup. Requests run
one after another, each alone: assisted generation takes no batches. Semantics, read off transformers 5.24 and tested:

- Logits are rounded to float32 before any processor and before the argmax, also in float64. Logprobs of a float64
  run come from the unrounded logits of the same forwards.
- Drafts are made before the prompt has run, so the first entry of `accept_lens` belongs to the forward that carried
  the prompt, and the accept lengths sum to the completion. A draft model drafts fewer tokens near `max_new_tokens`;
  prompt lookup drafts none where one token is left, and is not cut before that.
- Prompt lookup tries n-grams from the longest down to one token, and drafts no stop id and nothing behind it.
- Stop strings are matched in the prompt's tail too; the tokens that spell one are delivered, the text ends before it.
- Each draft of a model is sampled when the request is sampled; there is no greedy drafting for sampled requests.
- Sample i of n has the seed `seed` + i.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from harness.contract import Capabilities, DrafterSetup, EngineSetup, Refused, Request, SamplingParams
from harness.engines.environments import TORCH, Pip, Recipe, Step
from harness.engines.isolated import IsolatedFactory, Words
from harness.engines.isolated.base import refuse_request, refuse_setup, summed_bias
from harness.engines.isolated.engine import WORKERS

DRAFTERS = frozenset({"STANDALONE", "NGRAM"})

FEATURES = frozenset(
    {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "min_new_tokens",
        "stop_token_ids",
        "stop",
        "ignore_eos",
        "logprobs",
        "prompt_logprobs",
        "repetition_penalty",
        "logit_bias",
        "bad_words",
        "n",
        "greedy_n",
        "return_hidden_states",
    }
)
SAMPLING = frozenset({"temperature", "top_k", "top_p", "min_p", "seed", "n"})
ROOM = 8
"""Engines that are kept: checkpoints are small, and what they import they share."""


def _steps(wanted: str) -> tuple[Step, ...]:
    return (Pip((TORCH,)), Pip((f"transformers=={wanted}", TORCH)))


RECIPE = Recipe(
    engine="transformers",
    package="transformers",
    version=version("transformers"),
    steps=_steps,
    imports=("torch", "transformers"),
    variables={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    here=True,
)


class TransformersFactory(IsolatedFactory):
    """transformers of the harness's own environment, of a version, or of the environment that a Python belongs to."""

    def __init__(self, where: str = "") -> None:
        python, script = RECIPE.python(where), WORKERS / "transformers_worker.py"
        beside, environment = (WORKERS / "transformers_watch.py",), RECIPE.variables
        super().__init__(
            "transformers", TransformersDialect(), python, script, environment=environment, room=ROOM, beside=beside
        )


class TransformersDialect:
    """What transformers claims, and its words."""

    def capabilities(self, version: str, setup: EngineSetup) -> Capabilities:
        """A draft model rules out stop strings, and one that drafts greedily all sampling."""
        looks_up = setup.drafter is not None and setup.drafter.method == "NGRAM"
        return Capabilities(
            engine="transformers",
            version=version,
            drafters=DRAFTERS,
            features=FEATURES - _lost(setup.drafter),
            ignore_eos="emit",
            processor_order=("logit_bias", "penalties", "temperature", "top_k", "top_p", "min_p"),
            drafts_with_prefill=True,
            drafts_within_cap=not looks_up,
            drafts_for_last=False,
            seeds_of_samples="consecutive",
        )

    def start(self, version: str, setup: EngineSetup) -> Words:
        """What is loaded. Sizes of pages, chunks and batches mean nothing to it: it keeps one contiguous cache per
        request. How much is drafted is told with each request."""
        del version
        _refuse(setup)
        model = setup.drafter.model if setup.drafter is not None else None
        return {
            "target": str(setup.target),
            "draft": None if model is None else str(model),
            "dtype": setup.dtype,
            "device": setup.device,
            "seed": setup.seed,
        }

    def request(self, request: Request, setup: EngineSetup) -> Words:
        """`generate`: fields of `GenerationConfig`, to which the worker adds the stop ids of the checkpoint. `drafts`:
        how many tokens are drafted at most."""
        sampling = request.sampling
        _refuse_request(request)
        for fault in _clashes(sampling, setup.drafter):
            raise Refused(f"request {request.request_id!r}: {fault}")
        return {
            "id": request.request_id,
            "prompt_token_ids": list(request.prompt_token_ids),
            "context_length": setup.context_length,
            "n": sampling.n,
            "seed": sampling.seed,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": list(sampling.stop_token_ids),
            "logprobs": sampling.logprobs,
            "prompt_logprobs": sampling.prompt_logprobs,
            "drafts": 0 if setup.drafter is None else setup.drafter.num_steps,
            "generate": _generation(request) | _lookup(setup.drafter),
        }


def _lost(drafter: DrafterSetup | None) -> frozenset[str]:
    if drafter is None or drafter.method == "NGRAM":
        return frozenset()
    return frozenset({"stop"}) | (SAMPLING if drafter.draft_sample_method == "greedy" else frozenset())


def _refuse(setup: EngineSetup) -> None:
    """Raises `Refused` for what transformers has not got."""
    refuse_setup(
        setup,
        "transformers",
        ("overlap", setup.overlap, "there is no overlap scheduling; set it to False"),
        ("num_pages", setup.num_pages, "the cache is contiguous and has no pages; set it to 0"),
        float64=True,
    )
    drafter = setup.drafter
    if drafter is None:
        return
    if drafter.method not in DRAFTERS:
        raise Refused(f"drafter.method={drafter.method!r}: transformers is driven with {', '.join(sorted(DRAFTERS))}")
    looks_up, shortest = drafter.method == "NGRAM", drafter.prompt_lookup_min
    for name, wrong, reason in (
        ("topk", drafter.topk != 1, "assisted generation drafts chains, not trees; set it to 1"),
        ("script", drafter.script is not None, "assisted generation drafts by itself; leave the script out"),
        ("model", not looks_up and drafter.model is None, "STANDALONE needs a draft checkpoint; name its directory"),
        ("model", looks_up and drafter.model is not None, "prompt lookup has no checkpoint; leave it out"),
        ("prompt_lookup_min", looks_up and shortest != 1, "n-grams are tried down to one token; set it to 1"),
        ("prompt_lookup_max", looks_up and drafter.prompt_lookup_max < 1, "must be at least 1"),
        ("draft_sample_method", looks_up and drafter.draft_sample_method != "greedy", "a lookup draws from no law"),
    ):
        if wrong:
            raise Refused(f"drafter.{name}={getattr(drafter, name)!r}: {reason}")


def _refuse_request(request: Request) -> None:
    sampling = request.sampling
    refuse_request(
        request,
        ("arrival_step", request.arrival_step, "requests run one after another, there are no steps; use 0"),
        ("abort_step", request.abort_step is not None, "a running generation cannot be aborted; use None"),
        ("presence_penalty", sampling.presence_penalty, "transformers has no such penalty; use 0"),
        ("frequency_penalty", sampling.frequency_penalty, "transformers has no such penalty; use 0"),
        ("pooled_hidden", request.pooled_hidden is not None, "there is no pooling; use None"),
        ("num_speculative_tokens", request.num_speculative_tokens is not None, "the draft length is fixed; use None"),
        ("allowed_token_ids", sampling.allowed_token_ids, "transformers has no such filter; use ()"),
        ("json_schema", sampling.json_schema is not None, "transformers has no grammar backend; use None"),
        ("regex", sampling.regex is not None, "transformers has no grammar backend; use None"),
    )


def _clashes(sampling: SamplingParams, drafter: DrafterSetup | None) -> list[str]:
    faults: list[str] = []
    if sampling.stop and sampling.min_new_tokens:
        faults.append(
            f"min_new_tokens={sampling.min_new_tokens} with stop={sampling.stop!r}: transformers does not hold stop "
            f"strings back; use one of the two"
        )
    if drafter is None or drafter.method == "NGRAM":
        return faults
    if sampling.stop:
        faults.append(
            f"stop={sampling.stop!r} with a draft model: assisted generation takes no stop strings (its drafter's own "
            f"generation is given no tokenizer); use stop_token_ids"
        )
    if not sampling.greedy and drafter.draft_sample_method == "greedy":
        faults.append(
            f"temperature={sampling.temperature}: transformers samples the drafts of a sampled request; "
            f"start it with draft_sample_method='probabilistic'"
        )
    return faults


def _lookup(drafter: DrafterSetup | None) -> Words:
    if drafter is None or drafter.method != "NGRAM":
        return {}
    return {"prompt_lookup_num_tokens": drafter.num_steps, "max_matching_ngram_size": drafter.prompt_lookup_max}


def _generation(request: Request) -> Words:
    """Every field is set, so that no default of transformers or of the checkpoint can leak in."""
    sampling = request.sampling
    chosen: dict[str, Any] = {"do_sample": False}
    if not sampling.greedy:
        chosen = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
    return chosen | {
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": sampling.min_new_tokens or None,
        "stop_strings": list(sampling.stop) or None,
        "repetition_penalty": sampling.repetition_penalty,
        "sequence_bias": [[[token_id], float(value)] for token_id, value in summed_bias(sampling).items()] or None,
        "bad_words_ids": [list(word) for word in sampling.bad_words] or None,
        "output_hidden_states": request.return_hidden_states,
    }
