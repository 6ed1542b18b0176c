"""What an engine is told at start-up. Every mistake is a ValueError that names the field, the value and the mend."""

from __future__ import annotations

import dataclasses
import difflib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch

from kernels.base import Backend, Choice, choose_backend

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
Script = Callable[[str, tuple[int, ...], int], Sequence[int]]
Lateness = Callable[[int], int]
"""Number of a launch -> how many results, its own included, may stay unprocessed after it."""


def require(condition: bool, name: str, value: object, right: str) -> None:
    if not condition:
        raise ValueError(f"{name}={value!r}: {right}")


def pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


class _FromDict:
    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from a mapping; an unknown key is a ValueError that names the nearest right one."""
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]  # subclasses are dataclasses
        for key in values:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                mend = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(names)}"
                raise ValueError(f"unknown configuration key {key!r} for {cls.__name__}: {mend}")
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig(_FromDict):
    """Which drafter, and the shape of its drafts.

    A chain of k drafts is num_steps=k, topk=1, num_draft_tokens=k+1: the root (last committed token) counts, as in
    SGLang. With topk > 1 a tree is drafted (EAGLE-2): every step expands the topk best nodes by topk children and the
    num_draft_tokens - 1 best nodes of all are verified. `draft_sample_method` says how a sampled request's drafts are
    drawn: "greedy" (the argmax) or "probabilistic" (from the drafter's softmax at the request's temperature).
    NGRAM looks up n-grams of `prompt_lookup_min` to `prompt_lookup_max` tokens (vLLM's names and defaults).
    EXTRACT_HIDDEN_STATES keeps the residual stream that enters the layers `aux_layer_ids`, in this order.
    """

    method: str
    model: Path | None = None
    num_steps: int
    topk: int = 1
    num_draft_tokens: int
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    script: Script | None = None
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    aux_layer_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(self.num_steps >= 1, "num_steps", self.num_steps, "must be at least 1")
        require(self.topk >= 1, "topk", self.topk, "must be at least 1")
        most = self.num_nodes(self.num_steps) + 1
        if self.topk == 1:
            mend = f"must be num_steps + 1 = {self.num_steps + 1} for a chain (topk=1)"
            require(self.num_draft_tokens == self.num_steps + 1, "num_draft_tokens", self.num_draft_tokens, mend)
        else:
            mend = f"must lie in 2..{most}, the nodes of a tree of topk={self.topk}, num_steps={self.num_steps}"
            require(2 <= self.num_draft_tokens <= most, "num_draft_tokens", self.num_draft_tokens, mend)
        require(
            self.draft_sample_method in ("greedy", "probabilistic"),
            "draft_sample_method",
            self.draft_sample_method,
            "must be 'greedy' or 'probabilistic'",
        )
        require(
            self.topk == 1 or self.draft_sample_method == "greedy",
            "draft_sample_method",
            self.draft_sample_method,
            "a tree takes the drafter's best tokens, so it must be 'greedy' with topk > 1",
        )
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        require(
            1 <= shortest <= longest, "prompt_lookup_min", shortest, f"must lie in 1..prompt_lookup_max ({longest})"
        )

    def num_nodes(self, num_steps: int) -> int:
        """All that a tree (or chain) of so many steps grows, the root left out."""
        return self.topk + (num_steps - 1) * self.topk**2 if num_steps else 0

    def num_drafts(self, num_steps: int) -> int:
        """Draft tokens that are verified after so many of the steps."""
        return min(self.num_draft_tokens - 1, self.num_nodes(num_steps))

    @property
    def max_accept_len(self) -> int:
        """A tree may hold fewer nodes than it has steps."""
        return min(self.num_steps + 1, self.num_draft_tokens)

    @property
    def window_slots(self) -> int:
        """KV slots from the last committed token on that a verify window or the scratch of a draft takes."""
        return max(self.num_draft_tokens, self.topk * (self.num_steps - 1) + 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(_FromDict):
    """`page_size`, `chunk_size`, `context_length` in tokens; `num_pages` 0 = enough for max_running full requests.

    `overlap`: a step is launched before the results of the last `overlap_depth` ones are processed; `lateness`, for
    tests, says launch by launch how many of these really stay behind. `batch_buckets`: padded batch sizes, empty =
    none. `poison`: freed and unwritten KV holds a value that no model computes. `trace`: steps tell what was launched
    and processed. `snapshots`: drafters remember their inputs.

    `compile`: the target's decode pass goes through torch.compile, once for each batch size (see `batch_buckets`) and
    doubling of the context; each takes a quarter of a minute and, on a CPU, a C++ compiler. Results may differ from
    eager ones in the last bit. `cuda_graphs` records the same pass once for each of them and replays it. `kernels`:
    "triton" (compiled on CUDA, interpreted on a CPU; see `kernels.base`), "torch" (their references) or "auto".
    """

    model: Path
    spec: SpecConfig | None = None
    dtype: str = "float32"
    device: str = "cpu"
    context_length: int = 2048
    page_size: int = 16
    num_pages: int = 0
    max_running: int = 8
    chunk_size: int = 512
    prefix_cache: bool = True
    overlap: bool = False
    overlap_depth: int = 1
    lateness: Lateness | None = None
    batch_buckets: tuple[int, ...] = ()
    poison: bool = False
    trace: bool = False
    snapshots: bool = False
    compile: bool = False
    cuda_graphs: bool = False
    kernels: Choice = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.dtype in DTYPES, "dtype", self.dtype, f"must be one of {', '.join(DTYPES)}")
        for name in ("context_length", "page_size", "max_running", "chunk_size", "overlap_depth"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        require(self.num_pages >= 0, "num_pages", self.num_pages, "must be 0 (automatic) or positive")
        buckets = self.batch_buckets
        require(
            all(size >= 1 for size in buckets) and (not buckets or max(buckets) >= self.max_running),
            "batch_buckets",
            buckets,
            f"sizes must be positive and reach max_running ({self.max_running})",
        )
        backend = self.backend  # refuses what cannot run here
        require(not self.compile or backend == "torch", "compile", True, "needs kernels='torch'")
        if self.compile and self.device == "cpu":
            compilers = (os.environ.get("CXX", "g++"), "g++", "clang++")
            require(any(map(shutil.which, compilers)), "compile", True, f"needs a C++ compiler: {', '.join(compilers)}")
        if self.cuda_graphs:
            require(not self.compile, "cuda_graphs", True, "is another way of doing what compile does; choose one")
            require(self.device.startswith("cuda"), "cuda_graphs", True, f"needs a CUDA device, not {self.device!r}")
        if self.spec is not None:
            require(
                self.spec.num_draft_tokens < self.context_length,
                "num_draft_tokens",
                self.spec.num_draft_tokens,
                f"must be below context_length ({self.context_length})",
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def backend(self) -> Backend:
        return choose_backend(self.kernels, torch.device(self.device))

    @property
    def num_draft_tokens(self) -> int:
        """Width of the verify window; 1 without speculation."""
        return self.spec.num_draft_tokens if self.spec else 1

    @property
    def with_mtp(self) -> bool:
        """Whether the MTP layers of the target's checkpoint draft."""
        return self.spec is not None and self.spec.method == "MTP"

    @property
    def max_accept_len(self) -> int:
        return self.spec.max_accept_len if self.spec else 1

    @property
    def reserved_slots(self) -> int:
        """KV slots that one step may write past the tokens committed before it: it commits a block, then drafts from
        the new end."""
        return self.max_accept_len + (self.spec.window_slots if self.spec else 1)

    @property
    def slack_tokens(self) -> int:
        """Tokens that a request may run past its cap on the device: the blocks of the steps whose results were not
        processed, or the one cut by the finish, and the step after them."""
        return self.max_accept_len * self.overlap_depth + self.reserved_slots

    @property
    def max_pages_per_request(self) -> int:
        return pages_for(self.context_length + self.slack_tokens, self.page_size)

    @property
    def total_pages(self) -> int:
        return self.num_pages or self.max_running * self.max_pages_per_request

    def padded_batch(self, size: int) -> int:
        return min((bucket for bucket in self.batch_buckets if bucket >= size), default=size)
