"""What vLLM's `extract_hidden_states` keeps, handed over at once and in memory: vLLM's own connector copies on CUDA
streams and writes files. Named to vLLM by `kv_connector_module_path`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class HiddenStatesInMemory(ExampleHiddenStatesConnector):  # type: ignore[misc]  # of a package that is not here
    """`kept`: [tokens, layers, width] by vLLM's request id, of every request that has ended."""

    kept: ClassVar[dict[str, torch.Tensor]] = {}

    def _submit_async_write(self, pending: Any) -> None:
        places = torch.arange(self._block_size)
        slots = torch.tensor(pending.block_ids).reshape(-1, 1) * self._block_size + places
        rows = extract_from_kv_cache(self._kv_cache, slots.flatten(), len(pending.token_ids))
        self.kept[pending.req_id] = rows.clone()
        self._req_copy_events[pending.req_id] = _Done()


class _Done:
    """Stands for the event of a copy that is over."""

    def query(self) -> bool:
        return True
