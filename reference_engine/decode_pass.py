"""A decode step's pass of the target, and ways to run it in fewer launches: torch.compile, CUDA graphs.

Both want fixed shapes, so batches are padded to buckets and block tables to doublings of the context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch

from kernels.build_tree import Tree
from reference_engine.cache.recurrent import RecurrentPass
from reference_engine.sampling.sampler import Window


@dataclass(slots=True)
class TargetPass:
    """token_ids, cache_positions [N, n] of the verify windows, draft_tokens [N, n - 1]; hidden rows [N, n, hidden],
    auxiliary states, logits [N, n, V]; the states of recurrent layers after each node, until they are settled."""

    token_ids: torch.Tensor
    draft_tokens: torch.Tensor
    cache_positions: torch.Tensor
    hidden: torch.Tensor
    aux: torch.Tensor | None
    logits: torch.Tensor
    recurrent: RecurrentPass | None = None

    @property
    def features(self) -> torch.Tensor:
        """What a drafter reads: auxiliary states where they were collected."""
        return self.hidden if self.aux is None else self.aux

    def along(self, path: torch.Tensor) -> TargetPass:
        """The rows of the accepted path [N, w] alone, at the positions that they are moved to."""
        front = self.cache_positions[:, : path.shape[1]]
        aux = None if self.aux is None else _take_rows(self.aux, path)
        hidden, logits = _take_rows(self.hidden, path), _take_rows(self.logits, path)
        return TargetPass(self.token_ids.gather(1, path), self.draft_tokens, front, hidden, aux, logits)

    def clone(self) -> TargetPass:
        aux = None if self.aux is None else self.aux.clone()
        ids, drafts, positions = (x.clone() for x in (self.token_ids, self.draft_tokens, self.cache_positions))
        return TargetPass(ids, drafts, positions, self.hidden.clone(), aux, self.logits.clone())


def _take_rows(x: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """[N, Q, W] gathered along Q by [N, w]."""
    return x.gather(1, path[:, :, None].expand(-1, -1, x.shape[2]))


DecodePass = Callable[[Window, int], TargetPass]
"""Windows and the number of pages that they can see -> the target over them."""


def page_bucket(num_pages: int, most: int) -> int:
    """The next power of two, or `most`."""
    return min(1 << (num_pages - 1).bit_length(), most)


def compiled(method: DecodePass) -> DecodePass:
    """A bound method through torch.compile. Weights and caches stay what they are for the life of an engine, so only
    the arguments are looked at again; a code object of its own keeps what another engine compiled from being found."""
    function, owner = method.__func__, method.__self__  # type: ignore[attr-defined]  # it is a bound method
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__)
    guards: dict[str, str | int | bool | Callable[..., Any]] = {
        "guard_filter_fn": lambda guards: ["self" not in guard.name for guard in guards]
    }
    return torch.compile(MethodType(own, owner), dynamic=False, options=guards)


Recorded = tuple[Callable[[], None], TargetPass]
"""What runs the recorded work again, and the memory that its results appear in."""


def record_cuda_graph(work: Callable[[], TargetPass]) -> Recorded:
    """Run `work` for warm-up (kernels compile, libraries take their workspaces), then capture it. The warm-up writes
    the KV that the first replay will write again."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch gives it no types
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    return graph.replay, results


class GraphedPass:
    """A decode pass that is recorded once for each shape and replayed.

    A recording reads and writes fixed memory. The pool and the caches stay where they are; rows and trees change from
    launch to launch and are copied into buffers first. Results are copied out: under overlap scheduling the next
    replay comes before they are looked at.
    """

    def __init__(self, run: DecodePass, record: Callable[[Callable[[], TargetPass]], Recorded]) -> None:
        self._run = run
        self._record = record
        self._recordings: dict[tuple[int, int], tuple[Window, Recorded]] = {}

    def __call__(self, window: Window, num_pages: int) -> TargetPass:
        shape = (len(window.rows), num_pages)
        if shape not in self._recordings:
            buffers = Window(window.pool, window.rows.clone(), window.sampling, window.random)
            buffers.tree = None if window.tree is None else Tree._make(part.clone() for part in window.tree)
            self._recordings[shape] = buffers, self._record(lambda: self._run(buffers, num_pages))
        buffers, (replay, results) = self._recordings[shape]
        buffers.rows.copy_(window.rows)
        if buffers.tree is not None and window.tree is not None:
            for buffer, part in zip(buffers.tree, window.tree, strict=True):
                buffer.copy_(part)
        replay()
        return results.clone()
