"""What transformers is asked for: capabilities, refusals, and the translation of a request into its own terms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

from harness.contract import Capabilities, EngineSetup, Refused, Request, SamplingParams
from harness.engines.transformers_load import Checkpoint, new_generation_config

CAPABILITIES = Capabilities(
    engine="transformers",
    version=transformers.__version__,
    drafters=frozenset({"STANDALONE"}),
    features=frozenset(
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
    ),
    ignore_eos="emit",
    processor_order=("logit_bias", "penalties", "temperature", "top_k", "top_p", "min_p"),
    drafts_with_prefill=True,
    drafts_within_cap=True,
)

SAMPLING = frozenset({"temperature", "top_k", "top_p", "min_p", "seed"})


def capabilities(setup: EngineSetup) -> Capabilities:
    """What is claimed under `setup`: a drafter rules out stop strings, and one that drafts greedily all sampling."""
    if setup.drafter is None:
        return CAPABILITIES
    lost = {"stop"} | (SAMPLING if setup.drafter.draft_sample_method == "greedy" else set())
    return replace(CAPABILITIES, features=CAPABILITIES.features - lost)


def refuse_setup(setup: EngineSetup) -> None:
    """Raises `Refused` for what transformers has not got. Sizes that mean nothing to it are left unread."""
    for name, wanted, reason in (
        ("overlap", setup.overlap, "there is no overlap scheduling; set it to False"),
        ("batch_buckets", setup.batch_buckets, "requests run alone; leave it empty"),
        ("num_pages", setup.num_pages, "the cache is contiguous and has no pages; set it to 0"),
        ("snapshots", setup.snapshots, "this engine is a black box; set it to False"),
        ("kernels", setup.kernels != "auto" and setup.kernels, "there are no kernels to choose; set it to auto"),
    ):
        if wanted:
            raise Refused(f"{name}={wanted!r}: {reason}")
    if setup.device.startswith("cuda") and not torch.cuda.is_available():
        raise Refused(f"device={setup.device!r}: torch sees no CUDA device here; use 'cpu'")
    drafter = setup.drafter
    if drafter is None:
        return
    if drafter.method not in CAPABILITIES.drafters:
        known = ", ".join(sorted(CAPABILITIES.drafters))
        raise Refused(f"drafter.method={drafter.method!r}: transformers is driven with {known} only")
    if drafter.model is None:
        raise Refused("drafter.model=None: STANDALONE needs a draft checkpoint; name its directory")
    if drafter.topk != 1:
        raise Refused(f"drafter.topk={drafter.topk}: assisted generation drafts chains, not trees; set it to 1")
    if drafter.script is not None:
        raise Refused("drafter.script: assisted generation drafts with a model; leave the script out")


def refuse_request(request: Request, setup: EngineSetup, target: Checkpoint) -> None:
    """Raises `Refused` naming the request and the first field that cannot be honoured."""
    faults = (
        _unknown_fields(request)
        + _clashes(request.sampling, stop_ids(request.sampling, target), setup)
        + _limits(request, setup, target)
    )
    if faults:
        raise Refused(f"request {request.request_id!r}: {faults[0]}")


def _unknown_fields(request: Request) -> list[str]:
    sampling = request.sampling
    return [
        f"{name}={value!r}: {reason}"
        for name, value, neutral, reason in (
            ("arrival_step", request.arrival_step, 0, "requests run one after another, there are no steps; use 0"),
            ("abort_step", request.abort_step, None, "a running generation cannot be aborted; use None"),
            ("presence_penalty", sampling.presence_penalty, 0.0, "transformers has no such penalty; use 0"),
            ("frequency_penalty", sampling.frequency_penalty, 0.0, "transformers has no such penalty; use 0"),
            ("pooled_hidden", request.pooled_hidden, None, "there is no pooling; use None"),
            ("num_speculative_tokens", request.num_speculative_tokens, None, "the draft length is fixed; use None"),
            ("allowed_token_ids", sampling.allowed_token_ids, (), "transformers has no such filter; use ()"),
            ("json_schema", sampling.json_schema, None, "transformers has no grammar backend; use None"),
            ("regex", sampling.regex, None, "transformers has no grammar backend; use None"),
        )
        if value != neutral
    ]


def _clashes(sampling: SamplingParams, stops: list[int], setup: EngineSetup) -> list[str]:
    faults: list[str] = []
    if sampling.stop and sampling.min_new_tokens:
        faults.append(
            f"min_new_tokens={sampling.min_new_tokens} with stop={sampling.stop!r}: transformers does not hold stop "
            f"strings back; use one of the two"
        )
    if sampling.stop and setup.drafter is not None:
        faults.append(
            f"stop={sampling.stop!r} with a drafter: assisted generation takes no stop strings (its drafter's own "
            f"generation is given no tokenizer); use stop_token_ids"
        )
    unbannable = [word for word in sampling.bad_words if len(word) == 1 and word[0] in stops]
    if unbannable:
        faults.append(
            f"bad_words={unbannable!r}: transformers never bans a token that also stops the request; "
            f"set ignore_eos or leave the word out"
        )
    if setup.drafter is not None and not sampling.greedy and setup.drafter.draft_sample_method == "greedy":
        faults.append(
            f"temperature={sampling.temperature}: transformers samples the drafts of a sampled request; "
            f"start it with draft_sample_method='probabilistic'"
        )
    return faults


def _limits(request: Request, setup: EngineSetup, target: Checkpoint) -> list[str]:
    sampling = request.sampling
    faults: list[str] = []
    longest = len(request.prompt_token_ids) + sampling.max_new_tokens
    limit = min(setup.context_length, target.max_positions)
    if longest > limit:
        faults.append(
            f"prompt + max_new_tokens = {longest} exceeds the context of {limit}; lower max_new_tokens or raise "
            f"context_length"
        )
    asked = (*request.prompt_token_ids, *(token for word in sampling.bad_words for token in word))
    foreign = [token for token in (*asked, *(token for token, _ in sampling.logit_bias)) if token >= target.vocab_size]
    if foreign or min(asked) < 0:
        faults.append(f"token ids {foreign or min(asked)!r} lie outside the vocabulary of {target.vocab_size}")
    if sampling.stop and (problem := target.stop_string_problem()):
        faults.append(f"stop={sampling.stop!r}: {problem}")
    return faults


def stop_ids(sampling: SamplingParams, target: Checkpoint) -> list[int]:
    """Token ids that end this request. With `ignore_eos` the EOS token is emitted and generation goes on."""
    eos = () if sampling.ignore_eos else target.eos_token_ids
    return sorted({*eos, *sampling.stop_token_ids})


def generation_config(request: Request, stops: list[int]) -> GenerationConfig:
    """Every field is set, so that no default of transformers or of the checkpoint can leak in."""
    sampling = request.sampling
    bias: dict[int, float] = {}
    for token_id, value in sampling.logit_bias:
        bias[token_id] = bias.get(token_id, 0.0) + float(value)
    chosen: dict[str, Any] = {"do_sample": False}
    if not sampling.greedy:
        chosen = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
    return new_generation_config(
        **chosen,
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens or None,
        eos_token_id=stops or None,
        # The drafter's own `generate` masks pad ids out of its attention: name none that may be emitted.
        pad_token_id=stops[0] if stops else None,
        stop_strings=list(sampling.stop) or None,
        repetition_penalty=sampling.repetition_penalty,
        sequence_bias=[[[token_id], value] for token_id, value in bias.items()] or None,
        bad_words_ids=[list(word) for word in sampling.bad_words] or None,
        return_dict_in_generate=True,
        output_logits=True,
        output_hidden_states=request.return_hidden_states,
    )
