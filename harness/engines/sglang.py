"""SGLang, in a worker process with an environment of its own, on a CPU.

Requests and set-ups are put into SGLang's words here; what it does not take it is asked for all the same where it can
say so itself, and its error is the refusal. Semantics, read off SGLang 0.5.23 and tested:

- `chunk_size` is `chunked_prefill_size`: the most that all requests together prefill in a step.
- `top_p` acts on the whole distribution, not on what `top_k` has left.
- Logprobs are taken before the temperature acts, and after penalties, biases, `min_new_tokens` and grammars did.
- Drafts are cut neither at `max_new_tokens` nor at the context length.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from harness.contract import Capabilities, DrafterSetup, EngineSetup, Refused, Request
from harness.engines.environments import TORCH, Pip, Recipe, Step
from harness.engines.isolated import IsolatedFactory, Words
from harness.engines.isolated.base import refuse_request, refuse_setup, summed_bias
from harness.engines.isolated.engine import WORKERS

ALGORITHMS = frozenset({"STANDALONE", "EAGLE", "EAGLE3", "NGRAM"})
"""Drafters that are driven. SGLang's names are ours."""

FEATURES = frozenset(
    {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "min_new_tokens",
        "stop_token_ids",
        "stop",
        "ignore_eos",
        "logprobs",
        "prompt_logprobs",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "json_schema",
        "regex",
        "n",
        "greedy_n",
        "arrival_step",
        "abort_step",
        "return_hidden_states",
        "chunk_size",
        "prefix_cache",
        "num_pages",
    }
)
WITHOUT_DRAFTS = frozenset({"page_size", "overlap"})
"""Claimed without a drafter only, on a CPU."""
PAGE = 16
"""Tokens of a page where none is asked for. With drafts it must be one on a CPU: `get_last_loc` has no other kernel."""
SLACK = 64
"""Tokens of room that a request may take behind the context length, for its drafts."""
NO_SIZE = 64
"""Requests that run together where no smaller number is asked for: one engine then serves many set-ups."""
NODES = 100_000
"""Nodes of the trie of NGRAM, whose default of ten million takes gigabytes."""
ROOM = 6
"""Engines that are kept: their weights and pools are small, and what they import they share."""
RUNTIME = (
    *("orjson", "psutil", "pybase64", "requests", "pillow", "starlette", "msgspec", "pyzmq", "ipython", "aiohttp"),
    *("uvloop", "dill", "partial_json_parser", "uvicorn", "fastapi", "setproctitle", "einops", "gguf", "ninja"),
    *("apache-tvm-ffi==0.1.11", "sentencepiece==0.2.1", "compressed-tensors==0.18.0", "openai==2.8.0"),
    "xgrammar==0.2.7",
)
"""What SGLang imports on a CPU; the rest of what it depends on is for GPUs and would bring gigabytes."""


def _steps(version: str) -> tuple[Step, ...]:
    return (
        Pip((TORCH, "numpy", "transformers==5.19.0")),
        Pip((f"sglang=={version}", "torchvision==0.28.0", "triton"), dependencies=False),
        Pip(RUNTIME),
    )


RECIPE = Recipe(
    engine="sglang",
    package="sglang",
    version="0.5.23",
    steps=_steps,
    imports=("sglang",),
    before_imports=(
        "import sys, types; sys.modules['torchvision._meta_registrations'] = types.ModuleType('_meta_registrations')"
    ),
    programs={"g++": "apt-get install g++   (NGRAM compiles its corpus)"},
    variables={
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
        "SGLANG_USE_PICKLE_IPC": "1",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    },
)


class SglangFactory(IsolatedFactory):
    """SGLang of a version, or of the environment that a Python belongs to."""

    def __init__(self, where: str = "") -> None:
        python = RECIPE.python(where)
        script, beside = WORKERS / "sglang_worker.py", (WORKERS / "sgl_kernel_cpu", WORKERS / "sglang_queues.py")
        dialect, environment = SglangDialect(), RECIPE.variables
        super().__init__("sglang", dialect, python, script, environment=environment, room=ROOM, beside=beside)


class SglangDialect:
    """What SGLang claims, and its words."""

    def capabilities(self, version: str, setup: EngineSetup) -> Capabilities:
        return Capabilities(
            engine="sglang",
            version=version,
            drafters=ALGORITHMS,
            features=FEATURES | (WITHOUT_DRAFTS if setup.drafter is None else set()),
            ignore_eos="emit",
            grammar_before_logprobs=True,
            processor_order=("penalties", "logit_bias", "temperature", "top_p", "top_k", "min_p"),
        )

    def start(self, version: str, setup: EngineSetup) -> Words:
        """Arguments of `sglang.Engine`."""
        del version
        _refuse(setup)
        # A chunk must be of whole pages.
        page_size = 1 if setup.drafter is not None else setup.page_size or gcd(PAGE, setup.chunk_size)
        most = setup.max_running if setup.max_running < 8 else max(setup.max_running, NO_SIZE)
        enough = most * (setup.context_length + SLACK)
        # It keeps one page back from every request.
        room = setup.num_pages * (setup.page_size or PAGE) + page_size if setup.num_pages else enough
        words: dict[str, Any] = {
            "model_path": str(setup.target),
            "dtype": setup.dtype,
            "device": "cpu",
            "context_length": setup.context_length,
            "max_running_requests": most,
            "max_total_tokens": room,
            "chunked_prefill_size": setup.chunk_size,
            "page_size": page_size,
            "disable_radix_cache": not setup.prefix_cache,
            "disable_overlap_schedule": not setup.overlap,
            "random_seed": setup.seed,
            "attention_backend": "torch_native" if setup.drafter is None else "intel_amx",
            "sampling_backend": "pytorch",
            "grammar_backend": "xgrammar",
            "disable_cuda_graph": True,
            "skip_server_warmup": True,
            "enable_return_hidden_states": True,
            "log_level": "warning",
        }
        if setup.drafter is not None:
            words |= _speculative(setup.drafter)
        return words

    def request(self, request: Request, setup: EngineSetup) -> Words:
        """What `Engine.async_generate` takes, and when."""
        del setup
        refuse_request(
            request,
            ("pooled_hidden", request.pooled_hidden is not None, "SGLang has no such field"),
            ("num_speculative_tokens", request.num_speculative_tokens is not None, "SGLang has no such field"),
        )
        sampling = request.sampling
        return {
            "id": request.request_id,
            "prompt_token_ids": list(request.prompt_token_ids),
            "arrival_step": request.arrival_step,
            "abort_step": request.abort_step,
            "logprobs": sampling.logprobs,
            "prompt_logprobs": sampling.prompt_logprobs,
            "generate": {
                "input_ids": list(request.prompt_token_ids),
                "sampling_params": _sampling(request),
                "return_hidden_states": request.return_hidden_states,
                "stream": sampling.regex is not None or sampling.json_schema is not None,
            },
        }


def _refuse(setup: EngineSetup) -> None:
    """Raises `Refused` for what SGLang has no word for."""
    refuse_setup(
        setup,
        "SGLang",
        ("num_pages", setup.num_pages < 0 and setup.num_pages, "must be 0 (enough) or positive"),
        (
            "chunk_size",
            setup.chunk_size < 1 and str(setup.chunk_size),
            "must be positive; SGLang takes it for no limit",
        ),
        ("page_size", setup.page_size is not None and setup.page_size < 1 and "0", "must be None or positive"),
        ("device", setup.device != "cpu" and setup.device, "this adapter drives its CPU build; set it to cpu"),
    )
    drafter = setup.drafter
    if drafter is None:
        return
    if drafter.method not in ALGORITHMS:
        raise Refused(f"drafter.method={drafter.method!r}: SGLang is driven with {', '.join(sorted(ALGORITHMS))}")
    if setup.overlap:
        raise Refused("overlap=True: SGLang has no overlap scheduling with drafts on a CPU; set it to False")
    if setup.page_size not in (None, 1):
        raise Refused(
            f"page_size={setup.page_size}: with drafts SGLang looks into pages of more than one token with a Triton "
            "kernel (get_last_loc), for which a CPU has no driver; set it to 1"
        )
    if drafter.draft_sample_method != "greedy":
        raise Refused(
            f"drafter.draft_sample_method={drafter.draft_sample_method!r}: SGLang drafts greedily; set it to greedy"
        )


def _speculative(drafter: DrafterSetup) -> Mapping[str, Any]:
    words: dict[str, Any] = {
        "speculative_algorithm": drafter.method,
        "speculative_num_draft_tokens": drafter.num_draft_tokens,
    }
    if drafter.method == "NGRAM":
        return words | {"speculative_ngram_capacity": NODES}
    words |= {"speculative_num_steps": drafter.num_steps, "speculative_eagle_topk": drafter.topk}
    if drafter.model is not None:
        words["speculative_draft_model_path"] = str(drafter.model)
    return words


def _sampling(request: Request) -> Words:
    """Fields of SGLang's `SamplingParams`."""
    sampling = request.sampling
    refuse_request(
        request,
        ("seed", sampling.seed is not None, "heeded with deterministic inference only, which a CPU has not"),
        ("repetition_penalty", sampling.repetition_penalty != 1.0, "SGLang counts the output only, not the prompt"),
        ("bad_words", sampling.bad_words, "SGLang has no such field"),
        ("allowed_token_ids", sampling.allowed_token_ids, "SGLang has no such field"),
    )
    bias = {str(token_id): value for token_id, value in summed_bias(sampling).items()}
    return {
        "n": sampling.n,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": sampling.min_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "stop": list(sampling.stop) or None,
        "ignore_eos": sampling.ignore_eos,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": bias or None,
        "json_schema": sampling.json_schema,
        "regex": sampling.regex,
    }
