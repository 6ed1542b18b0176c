"""Training, resumable: the target on text, then its drafters on what the stored target makes of more text."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from harness.known_answer.blocks import Shape
from harness.trained import checkpoints
from harness.trained.plan import DRAFTERS, FURTHER, TARGET, Plan
from harness.trained.spoken import half_spoken
from harness.trained.target import SHAPE, Llama

STEPS_BETWEEN_STATES = 10
LOG = "log.jsonl"
MODEL = "model"
ENDS = re.compile("embed_tokens|lm_head")


OnStep = Callable[[str, int, int, dict[str, float]], None]
"""(stage, steps done, steps in all, losses) after each step."""


class Classroom(nn.Module):
    """Drafters of a target, which says once what each of them learns from."""

    def __init__(self, target: Llama, drafters: Mapping[str, checkpoints.Drafter]) -> None:
        super().__init__()
        # Not a submodule: it is no longer trained.
        self.teach = torch.no_grad()(target.forward)
        self.by_name = dict(drafters)
        self.drafters = nn.ModuleDict(self.by_name)

    def losses(self, ids: Tensor) -> dict[str, Tensor]:
        """Of each drafter, in nats."""
        lesson = self.teach(ids)
        return {name: drafter.loss(lesson) for name, drafter in self.by_name.items()}


def train(
    out: Path,
    *,
    plans: tuple[Plan, Plan] = (TARGET, DRAFTERS),
    further: Mapping[str, Plan] = FURTHER,
    shape: Shape = SHAPE,
    on_step: OnStep | None = None,
) -> None:
    """Write all checkpoints, a log and checksums into `out`. Run again with the same arguments after an interruption,
    it goes on where it was."""
    out.mkdir(parents=True, exist_ok=True)
    if not list(out.glob("state-*.safetensors")):
        (out / LOG).unlink(missing_ok=True)
    on_step = on_step or (lambda *_: None)
    torch.manual_seed(plans[0].seed)
    target = Llama(shape)
    _Fit("target", plans[0], target, out, on_step).run()
    checkpoints.write(target, out / "target")
    stored = checkpoints.target(out, shape)
    torch.manual_seed(plans[1].seed)
    classroom = Classroom(stored, {name: make(stored) for name, make in checkpoints.DRAFTERS.items()})
    _Fit("drafters", plans[1], classroom, out, on_step).run()
    for name, plan in further.items():
        alone = Classroom(stored, {name: classroom.by_name[name]})
        _Fit(name, plan, alone, out, on_step, half_spoken(plan, out)).run()
    for name, drafter in classroom.by_name.items():
        checkpoints.write(drafter, out / name)
    for state in out.glob("state-*.safetensors"):
        state.unlink()
    checkpoints.write_sums(out)


class _Fit:
    """One stage: Muon on the matrices between embeddings and head, AdamW on the rest, both on the sum of the losses."""

    def __init__(
        self,
        stage: str,
        plan: Plan,
        model: Llama | Classroom,
        out: Path,
        on_step: OnStep,
        windows: Callable[[int], Tensor] | None = None,
    ) -> None:
        """`windows` of each step, those of the plan if there are no others."""
        self.stage, self.plan, self.model, self.on_step = stage, plan, model, on_step
        self.windows = windows or plan.windows
        self.state, self.log = out / f"state-{stage}.safetensors", out / LOG
        self.learnt = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
        inner = {name for name, tensor in self.learnt.items() if tensor.dim() == 2 and not ENDS.search(name)}
        self.optimizers: dict[torch.optim.Optimizer, float] = {
            torch.optim.Muon([self.learnt[name] for name in sorted(inner)], weight_decay=0.05, momentum=0.9): 1.0,
            torch.optim.AdamW(
                [self.learnt[name] for name in sorted(self.learnt.keys() - inner)],
                betas=(0.9, 0.95),
                weight_decay=0.0,
                fused=True,
            ): 0.4,
        }
        """With the share of the plan's rate that each takes."""
        self.step, self.seconds = 0, 0.0

    def run(self) -> None:
        if self.state.exists():
            self._restore()
        else:
            self._log(plan=asdict(self.plan), torch=torch.__version__)
        self.model.train()
        start = time.process_time()
        while self.step < self.plan.steps:
            losses = self._step()
            self.step += 1
            if self.step % STEPS_BETWEEN_STATES == 0 or self.step == self.plan.steps:
                now = time.process_time()
                self.seconds, start = self.seconds + now - start, now
                self._save(losses)
            self.on_step(self.stage, self.step, self.plan.steps, losses)

    def _step(self) -> dict[str, float]:
        losses = self.model.losses(self.windows(self.step))
        torch.autograd.backward(list(losses.values()))
        nn.utils.clip_grad_norm_(self.learnt.values(), 1.0)
        for optimizer, share in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = share * self.plan.rate(self.step)
            optimizer.step()
            optimizer.zero_grad()
        return {name: round(loss.item(), 4) for name, loss in losses.items()}

    def _save(self, losses: dict[str, float]) -> None:
        """The state before the log: a line that is missing does less harm than one that is there twice."""
        kept = {f"{MODEL}/{name}": tensor.detach() for name, tensor in self.learnt.items()}
        for optimizer, name, tensor in self._owners():
            kept |= {f"{key}/{name}": value for key, value in optimizer.state[tensor].items()}
        draft = self.state.with_suffix(".tmp")
        save_file(kept, draft, metadata={"step": str(self.step), "cpu_seconds": str(self.seconds)})
        draft.replace(self.state)
        self._log(step=self.step, losses=losses, cpu_seconds=round(self.seconds, 1))

    @torch.no_grad()
    def _restore(self) -> None:
        kept = load_file(self.state)
        with safe_open(self.state, framework="pt") as file:
            self.step, self.seconds = int(file.metadata()["step"]), float(file.metadata()["cpu_seconds"])
        for optimizer, name, tensor in self._owners():
            mine = {key: kept[key] for key in kept if key.endswith(f"/{name}")}
            tensor.copy_(mine.pop(f"{MODEL}/{name}"))
            optimizer.state[tensor] = {key.removesuffix(f"/{name}"): value for key, value in mine.items()}

    def _owners(self) -> Iterator[tuple[torch.optim.Optimizer, str, Tensor]]:
        """Each parameter with the optimizer that moves it."""
        names = {id(tensor): name for name, tensor in self.learnt.items()}
        for optimizer in self.optimizers:
            for tensor in optimizer.param_groups[0]["params"]:
                yield optimizer, names[id(tensor)], tensor

    def _log(self, **entry: object) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"stage": self.stage, **entry}) + "\n")
