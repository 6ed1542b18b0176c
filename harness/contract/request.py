"""What an engine is asked: requests, and what is done to the engine between its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PooledRows = Literal["prompt", "output", "both"]
ActionName = Literal[
    "pause",
    "resume",
    "preempt",
    "reset_prefix_cache",
    "sleep",
    "wake",
    "reload_target",
    "reload_drafter",
    "set_num_steps",
]


def require(condition: bool, name: str, value: object, right: str) -> None:
    if not condition:
        raise ValueError(f"{name}={value!r}: {right}")


class Refused(ValueError):
    """An engine declines a setup or a request, at start-up or on arrival, and says why. Not a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Defaults decode greedily.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `logprobs` None is off, 0 asks for the
    sampled token only, n for the n best beside it; `prompt_logprobs` likewise over the prompt. Penalties follow the
    OpenAI definitions over output tokens; `repetition_penalty` (CTRL) counts the prompt too. `logit_bias` pairs are
    (token id, additive bias in nats). `bad_words` are token sequences that must not come up in the output (the prompt
    begins none, as in vLLM); `allowed_token_ids`, when there are any, the only ones that may, EOS included.
    `json_schema` is JSON text. The output spells a text of the `json_schema` or `regex`, and EOS follows where it is
    whole. Raises ValueError naming the field.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 16
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    json_schema: str | None = None
    regex: str | None = None
    n: int = 1

    def __post_init__(self) -> None:
        require(self.temperature >= 0, "temperature", self.temperature, "must be 0 (greedy) or positive")
        require(self.top_k >= 0, "top_k", self.top_k, "must be 0 (off) or positive")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "must lie in (0, 1]")
        require(0 <= self.min_p < 1, "min_p", self.min_p, "must lie in [0, 1)")
        require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "must be at least 1")
        require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            self.min_new_tokens,
            f"must lie in 0..max_new_tokens ({self.max_new_tokens})",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(value is None or value >= 0, name, value, "must be None or >= 0")
        require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "must be positive")
        require(all(self.stop), "stop", self.stop, "stop strings must not be empty")
        require(all(self.bad_words), "bad_words", self.bad_words, "token sequences must not be empty")
        require(self.n >= 1, "n", self.n, "must be at least 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. `arrival_step` and `abort_step` count the engine's steps from the start of the run (0-based).

    `pooled_hidden` asks for the mean of the final-norm rows of the prompt, of the output tokens that were an input, or
    of both together. `num_speculative_tokens` is the most that may be drafted for it in a step, None = no limit of its
    own.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    return_hidden_states: bool = False
    arrival_step: int = 0
    abort_step: int | None = None
    pooled_hidden: PooledRows | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        require(bool(self.request_id), "request_id", self.request_id, "must not be empty")
        require(len(self.prompt_token_ids) > 0, "prompt_token_ids", self.prompt_token_ids, "must not be empty")
        require(self.arrival_step >= 0, "arrival_step", self.arrival_step, "must be >= 0")
        require(
            self.abort_step is None or self.abort_step >= self.arrival_step,
            "abort_step",
            self.abort_step,
            f"must be None or >= arrival_step ({self.arrival_step})",
        )
        limit = self.num_speculative_tokens
        require(limit is None or limit >= 0, "num_speculative_tokens", limit, "must be None or >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Something done to a running engine before its step `step`, counted as `Request.arrival_step` is. An engine claims
    an action by its name, among its features.

    pause: no step is launched, and no request is lost, until resume. preempt: the running request `value` (its id and
    sample, "id#index") gives its pages back and starts again later; no effect on one that is not running.
    reset_prefix_cache: forget what no running request holds. sleep: as pause, and weights and KV are given up until
    wake. reload_target, reload_drafter: read the weights again, from the same files; what other weights than those
    have computed is not used any more. An action without meaning where it comes (wake without sleep) is a ValueError.
    set_num_steps: draft `value` tokens a step from now on (0 = none), at most as many as the engine was started with.
    """

    step: int
    name: ActionName
    value: int | str | None = None

    def __post_init__(self) -> None:
        require(self.step >= 0, "step", self.step, "must be >= 0")
        wanted = {"preempt": str, "set_num_steps": int}.get(self.name, type(None))
        require(isinstance(self.value, wanted), "value", self.value, f"{self.name} takes {wanted.__name__}")
