"""Reading out a request's device state, for checks: what the engine will use in its next step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reference_engine.cache.kv import slots_of
from reference_engine.engine import LLMEngine
from reference_engine.request import RequestState


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Committed tokens on the device (n of them); target_kv [n - 1, layers, 2, kv_heads, head_dim] and the same of the
    drafter over its valid rows; the ids and feature rows that it was fed (see `Drafter.fed`), or what it keeps of the
    layers; recurrent_state [recurrent layers, heads, key_dim, value_dim] after the first n - 1 tokens."""

    owner: str
    token_ids: tuple[int, ...]
    target_kv: torch.Tensor
    draft_kv: torch.Tensor | None
    draft_input_ids: torch.Tensor | None
    draft_features: torch.Tensor | None
    recurrent_state: torch.Tensor | None


def take_snapshot(engine: LLMEngine, request: RequestState) -> Snapshot:
    """Copies; valid for a running request whose prefill has been launched to its end."""
    pool, row = engine.pool, request.row
    length = int(pool.seq_lens[row])
    positions = torch.arange(length, device=pool.seq_lens.device)
    slots = slots_of(pool.block_table[row : row + 1], positions[None], engine.config.page_size)[0]
    draft_kv = draft_ids = draft_features = None
    drafter = engine.drafter
    if drafter is not None and drafter.caches():
        valid = drafter.final_slots(slots)
        draft_kv = torch.cat([cache.read(valid) for cache in drafter.caches()], dim=1)
    if drafter is not None:
        draft_ids, draft_features = drafter.fed(slots)
        kept = drafter.layer_states(request.pages, length - 1)
        if kept is not None:
            draft_features = kept.flatten(1)
    return Snapshot(
        owner=request.owner,
        token_ids=tuple(pool.token_ids[row, :length].tolist()),
        target_kv=engine.cache.read(slots[:-1]),
        draft_kv=draft_kv,
        draft_input_ids=draft_ids,
        draft_features=draft_features,
        recurrent_state=None if pool.recurrent is None else pool.recurrent.states[:, row].clone(),
    )


def running_snapshots(engine: LLMEngine) -> tuple[Snapshot, ...]:
    """Snapshots of every running request that has been prefilled and has not finished."""
    ready = (r for r in engine.scheduler.running if not r.prefilling and not r.finished)
    return tuple(take_snapshot(engine, request) for request in ready)
