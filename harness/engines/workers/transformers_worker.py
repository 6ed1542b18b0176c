"""transformers behind the wire: `generate` for one request after another, each alone.

Nothing of transformers is changed, and what it gives is delivered unmended: tokens, raw logits and hidden states are
its own output. What it does not report of a generation is read off by `transformers_watch`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from wire import Refused, Tensors, serve

MODULES = (
    "transformers.generation.candidate_generator",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers_watch",
)
"""What a start or the first request would import otherwise, at seconds each time."""
STOP_STRING_PROBE = "abcdef"
"""transformers measures every token of the vocabulary behind this text when it compiles stop strings."""


@dataclass(frozen=True)
class Checkpoint:
    """A causal language model in memory. `tokenizer` is None when the directory has none."""

    model: Any
    tokenizer: Any
    eos_token_ids: tuple[int, ...]

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def stop_ids(self, request: dict[str, Any]) -> list[int]:
        """What ends a request. With `ignore_eos` the EOS token is emitted and generation goes on."""
        eos = () if request["ignore_eos"] else self.eos_token_ids
        return sorted({*eos, *request["stop_token_ids"]})

    def decode(self, token_ids: list[int]) -> str | None:
        if self.tokenizer is None:
            return None
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def stop_string_problem(self) -> str | None:
        """Why stop strings cannot be used with this checkpoint, or None."""
        if self.tokenizer is None:
            return "the checkpoint has no tokenizer; add tokenizer.json"
        probe = self.tokenizer(STOP_STRING_PROBE, add_special_tokens=False)["input_ids"]
        if self.tokenizer.decode(probe) != STOP_STRING_PROBE:
            return f"transformers needs a tokenizer that can encode {STOP_STRING_PROBE!r}"
        return None


class Served:
    """A target, and perhaps a drafter. Keeps nothing between requests but the stream of unseeded seeds."""

    def __init__(self) -> None:
        self.target: Any = None
        self.draft: Any = None
        self.words: dict[str, Any] = {}
        self.seeds: Any = None

    def load(self) -> None:
        for name in MODULES:
            import_module(name)
        quiet = import_module("transformers.utils.logging")
        quiet.set_verbosity_error()
        quiet.disable_progress_bar()

    def start(self, words: dict[str, Any]) -> dict[str, Any]:
        import torch

        if words["device"].startswith("cuda") and not torch.cuda.is_available():
            raise Refused(f"device={words['device']!r}: torch sees no CUDA device here; use 'cpu'")
        self.words, self.seeds = words, torch.Generator()
        self.target = load_checkpoint(words, "target")
        if words["draft"] is not None:
            self.draft = load_checkpoint(words, "draft")
            if self.draft.vocab_size != self.target.vocab_size:
                raise Refused(
                    f"drafter.model={words['draft']}: its vocabulary of {self.draft.vocab_size} differs from the "
                    f"target's {self.target.vocab_size}; name a drafter with the target's tokenizer"
                )
        self.reset()
        return {}

    def run(self, order: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
        for action in order["actions"]:
            raise Refused(f"{action['name']}: nothing can be done to transformers while it generates")
        for request in order["requests"]:
            for fault in faults(request, self.target):
                raise Refused(f"request {request['id']!r}: {fault}")
        return {
            "completions": [
                self._completion(request, index, tensors)
                for request in order["requests"]
                for index in range(request["n"])
            ]
        }

    def reset(self) -> None:
        self.seeds.manual_seed(self.words["seed"])

    def stop(self) -> None:
        self.target = self.draft = None

    def _completion(self, request: dict[str, Any], index: int, tensors: Tensors) -> dict[str, Any]:
        import torch
        from transformers_watch import GenerationWatch

        prompt = torch.tensor([request["prompt_token_ids"]], device=self.words["device"])
        watch = GenerationWatch(prompt_len=prompt.shape[1])
        output = self._generate(request, index, prompt, watch)
        sequence = output.sequences[0].tolist()
        tokens = sequence[prompt.shape[1] :]
        greedy = not request["generate"]["do_sample"]
        reason = self._finish_reason(request, output.sequences)
        return {
            "request_id": request["id"],
            "index": index,
            "prompt_token_ids": request["prompt_token_ids"],
            "token_ids": tokens,
            "finish_reason": reason,
            "usage": {"prompt_tokens": prompt.shape[1], "completion_tokens": len(tokens)},
            "text": self._text(request, tokens, reason),
            "logprobs": self._logprobs(request["logprobs"], tokens, output, watch, sequence),
            "prompt_logprobs": self._prompt_logprobs(request["prompt_logprobs"], prompt),
            "hidden_states": _hidden(output.hidden_states, tensors),
            "accept_lens": watch.accept_lens(sequence, greedy=greedy) if request["drafts"] else None,
            "draft_lens": watch.draft_lens() if request["drafts"] else None,
        }

    def _generate(self, request: dict[str, Any], index: int, prompt: Any, watch: Any) -> Any:
        import torch
        from transformers import LogitsProcessorList

        words, stops = request["generate"], self.target.stop_ids(request)
        config = generation_config(
            **words,
            eos_token_id=stops or None,
            # The drafter's own `generate` masks pad ids out of its attention: name none that may be emitted.
            pad_token_id=stops[0] if stops else None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        if self.draft is not None:
            self.draft.model.generation_config = generation_config(
                num_assistant_tokens=request["drafts"],
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,
            )
        with watch.attached(self.target.model):
            torch.manual_seed(self._seed(request["seed"], index))
            return self.target.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
                logits_processor=LogitsProcessorList([watch]),
                assistant_model=None if self.draft is None else self.draft.model,
                tokenizer=self.target.tokenizer if words["stop_strings"] else None,
            )

    def _seed(self, asked: int | None, index: int) -> int:
        import torch

        return int(torch.randint(2**62, (1,), generator=self.seeds)) if asked is None else asked + index

    def _finish_reason(self, request: dict[str, Any], sequences: Any) -> str:
        from transformers import StopStringCriteria

        if int(sequences[0, -1]) in self.target.stop_ids(request):
            return "stop"
        strings = request["generate"]["stop_strings"]
        if strings and bool(StopStringCriteria(self.target.tokenizer, strings)(sequences, None)[0]):
            return "stop"
        return "length"

    def _text(self, request: dict[str, Any], tokens: list[int], reason: str) -> str | None:
        """Decoded without special tokens; what stopped the request is not part of it."""
        ended = bool(tokens) and tokens[-1] in self.target.stop_ids(request)
        text: str | None = self.target.decode(tokens[:-1] if ended else tokens)
        if text is None or ended or reason != "stop":
            return text
        # The last place: one that was passed over is part of what was delivered.
        strings = request["generate"]["stop_strings"]
        return text[: min((place for stop in strings if (place := text.rfind(stop)) >= 0), default=len(text))]

    def _logprobs(self, num_top: int | None, tokens: list[int], output: Any, watch: Any, sequence: list[int]) -> Any:
        if num_top is None:
            return None
        exact = self.words["dtype"] == "float64"
        rows = watch.raw_logits(sequence) if exact else [row[0] for row in output.logits]
        # Not strict: a count that differs from the tokens' is the engine's fault, and COUNT-1's to find.
        return [logprob_row(row, token_id, num_top) for row, token_id in zip(rows, tokens, strict=False)]

    def _prompt_logprobs(self, num_top: int | None, prompt: Any) -> Any:
        import torch

        if num_top is None:
            return None
        with torch.no_grad():
            logits = self.target.model(prompt).logits[0]
        later = prompt[0, 1:].tolist()
        return [None, *(logprob_row(row, token_id, num_top) for row, token_id in zip(logits, later, strict=False))]


def load_checkpoint(words: dict[str, Any], role: str) -> Checkpoint:
    """Load a Hugging Face directory without transformers' leniency: nothing may run with a weight that was not read.
    Raises `Refused`, which names the field of the set-up, when it does not fit."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = Path(words[role])
    named = f"{'target' if role == 'target' else 'drafter.model'}={directory}"
    if not (directory / "config.json").is_file():
        raise Refused(f"{named}: there is no config.json; name a Hugging Face checkpoint directory")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=getattr(torch, words["dtype"]),
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            # Not to run with them: so that they are named in the refusal below.
            ignore_mismatched_sizes=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise Refused(f"{named}: transformers cannot load it: {error}") from error
    model, info = loaded
    wrong = {name: sorted(map(str, keys)) for name, keys in info.items() if keys}
    if wrong:
        raise Refused(f"{named}: the tensors do not fit the config: {wrong}")
    eos = model.generation_config.eos_token_id
    # Sampling defaults that a checkpoint carries would leak into requests that did not ask for them.
    model.generation_config = generation_config()
    has_tokenizer = (directory / "tokenizer.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True) if has_tokenizer else None
    ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return Checkpoint(model.to(words["device"]).eval(), tokenizer, ids)


def generation_config(**fields: Any) -> Any:
    """Of these fields alone, whatever a checkpoint says."""
    return import_module("transformers").GenerationConfig(**fields)


def faults(request: dict[str, Any], target: Checkpoint) -> list[str]:
    """What of a request this target cannot honour."""
    words, found = request["generate"], []
    bad_words = words["bad_words_ids"] or []
    unbannable = [word for word in bad_words if len(word) == 1 and word[0] in target.stop_ids(request)]
    if unbannable:
        found.append(
            f"bad_words={unbannable!r}: transformers never bans a token that also stops the request; "
            f"set ignore_eos or leave the word out"
        )
    longest = len(request["prompt_token_ids"]) + words["max_new_tokens"]
    limit = min(request["context_length"], int(target.model.config.max_position_embeddings))
    if longest > limit:
        found.append(
            f"prompt + max_new_tokens = {longest} exceeds the context of {limit}; lower max_new_tokens or raise "
            f"context_length"
        )
    asked = [*request["prompt_token_ids"], *(token for word in bad_words for token in word)]
    biased = [token for (token,), _ in words["sequence_bias"] or ()]
    foreign = [token for token in (*asked, *biased) if not 0 <= token < target.vocab_size]
    if foreign:
        found.append(f"token ids {foreign} lie outside the vocabulary of {target.vocab_size}")
    if words["stop_strings"] and (problem := target.stop_string_problem()):
        found.append(f"stop={words['stop_strings']!r}: {problem}")
    return found


def logprob_row(logits: Any, token_id: int, num_top: int) -> dict[str, Any]:
    """The row of `token_id` under raw `logits` [V]; computed in float64, in nats. Of `num_top` tokens that are equally
    probable the lower id comes first."""
    values = logits.detach().to("cpu").double()
    logprobs = values - values.logsumexp(dim=-1)
    rank = 1 + int((values > values[token_id]).sum())
    order = values.sort(descending=True, stable=True).indices[:num_top].tolist()
    top = [[token, float(logprobs[token])] for token in order]
    return {"token_id": token_id, "logprob": float(logprobs[token_id]), "rank": rank, "top": top}


def _hidden(per_token: Any, tensors: Tensors) -> dict[str, Any] | None:
    """`per_token[i][-1]` is the final-norm output [1, rows, width] of the forward that yielded token i: the whole
    prompt for token 0, one row afterwards."""
    if per_token is None:
        return None
    prefill, *decode = (layers[-1][0] for layers in per_token)
    return {"prefill": tensors(prefill), "decode": [tensors(rows[-1]) for rows in decode]}


if __name__ == "__main__":
    serve(Served(), {"name": "transformers", "version": version("transformers")})
