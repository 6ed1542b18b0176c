"""The reference engine on stock Hugging Face checkpoints: the numbers of transformers, or a refusal that names why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from harness.contract import Completion, DType, EngineSetup, Request, SamplingParams
from harness.workloads.lanes import factory_of
from harness.workloads.random_checkpoints import edit_config, encode, random_checkpoint
from suites.registration import suite

suite(seconds=3.2, stage="cpu", needs="cpu")

TOLERANCE: dict[DType, float] = {"float32": 1e-4, "float64": 1e-9}
PROMPTS = ("a", "Hello, world", "0123456789 " * 9)
NUM_TOKENS = 12

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama"},
    "llama-tied": {"architecture": "llama", "tie_word_embeddings": True},
    "llama-one-kv-head": {"architecture": "llama", "num_key_value_heads": 1},
    "llama-no-groups": {"architecture": "llama", "num_key_value_heads": 4},
    "llama-wide-heads": {"architecture": "llama", "head_dim": 32},
    "llama-biases": {"architecture": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-theta": {
        "architecture": "llama",
        "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
        "rms_norm_eps": 1e-2,
    },
    "llama-linear-rope": {
        "architecture": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    },
    "llama3-rope": {"architecture": "llama", "rope_parameters": LLAMA3_ROPE},
    "qwen2": {"architecture": "qwen2"},
    "qwen2-tied": {"architecture": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"architecture": "qwen3"},
    "qwen3-biases": {"architecture": "qwen3", "attention_bias": True, "tie_word_embeddings": True},
}


def make(directory: Path, case: str) -> Path:
    return random_checkpoint(directory, seed=17, **CASES[case])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A checkpoint of its own to damage."""
    shutil.copytree(llama, tmp_path / "copy")
    return tmp_path / "copy"


def run(directory: Path, dtype: DType = "float32") -> tuple[Completion, ...]:
    """All prompts in one batch, greedily, with everything that can be compared."""
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    requests = [
        Request(request_id=text, prompt_token_ids=encode(text), sampling=params, return_hidden_states=True)
        for text in PROMPTS
    ]
    engine = factory_of("reference").start(EngineSetup(target=directory, dtype=dtype))
    completions = engine.run(requests).completions
    engine.close()
    return completions


def transformers_model(directory: Path, dtype: DType) -> Any:
    """The stock model, except that its norms, which round to float32 whatever the dtype, keep float64."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    if dtype == "float64":
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = MethodType(_rms_norm, module)
    return model


def _rms_norm(norm: Any, rows: torch.Tensor) -> torch.Tensor:
    scale: torch.Tensor = (rows.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    return norm.weight * rows * scale  # type: ignore[no-any-return]


@torch.no_grad()
def assert_equal_to_transformers(done: Completion, model: Any, dtype: DType) -> None:
    """Every row of the run against one whole forward over the same tokens, without a KV cache."""
    tokens = torch.tensor([*done.prompt_token_ids, *done.token_ids])
    output = model(tokens[None, :-1], output_hidden_states=True)
    expected = output.logits[0].double().log_softmax(-1)
    assert list(done.token_ids) == expected.argmax(-1)[len(done.prompt_token_ids) - 1 :].tolist()

    rows = [*(done.prompt_logprobs or ())[1:], *(done.logprobs or ())]
    got = torch.tensor([row.logprob for row in rows if row is not None], dtype=torch.float64)
    torch.testing.assert_close(got, expected.gather(1, tokens[1:, None])[:, 0], atol=TOLERANCE[dtype], rtol=0)
    best = torch.tensor([[logprob for _, logprob in row.top] for row in rows if row is not None], dtype=torch.float64)
    torch.testing.assert_close(best, expected.topk(2).values, atol=TOLERANCE[dtype], rtol=0)

    assert done.hidden_states is not None
    hidden = torch.cat([done.hidden_states.prefill, torch.stack(done.hidden_states.decode)])
    torch.testing.assert_close(hidden, output.hidden_states[-1][0], atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_numbers_as_transformers(case: str, dtype: DType, tmp_path: Path) -> None:
    directory = make(tmp_path, case)
    model = transformers_model(directory, dtype)
    completions = run(directory, dtype)
    assert [len(done.token_ids) for done in completions] == [NUM_TOKENS] * len(PROMPTS)
    for done in completions:
        assert_equal_to_transformers(done, model, dtype)


def test_tokens_equal_those_of_generate(llama: Path) -> None:
    params = SamplingParams(max_new_tokens=40)
    requests = [Request(request_id=text, prompt_token_ids=encode(text), sampling=params) for text in PROMPTS]
    runs = [factory_of(name).start(EngineSetup(target=llama)).run(requests) for name in ("reference", "transformers")]
    ours, theirs = ([(one.token_ids, one.text, one.finish_reason) for one in run.completions] for run in runs)
    assert ours == theirs


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3"])
def test_bfloat16_loads_and_rounds_no_more_than_transformers(case: str, tmp_path: Path) -> None:
    """Against the same rounded weights in float64, our mean error is at most twice that of transformers in bfloat16."""
    directory = make(tmp_path, case)
    rounded = transformers_model(directory, "bfloat16")
    exact = transformers_model(directory, "bfloat16").double()
    ours, theirs = [], []
    for done in run(directory, "bfloat16"):
        assert done.hidden_states is not None
        assert done.hidden_states.prefill.dtype == torch.bfloat16
        tokens = torch.tensor([*done.prompt_token_ids, *done.token_ids])
        right = teacher_forced(exact, tokens)
        rows = [*(done.prompt_logprobs or ())[1:], *(done.logprobs or ())]
        got = torch.tensor([row.logprob for row in rows if row is not None], dtype=torch.float64)
        ours.append((got - right).abs())
        theirs.append((teacher_forced(rounded, tokens) - right).abs())
    assert torch.cat(ours).mean() <= 2 * torch.cat(theirs).mean()


@torch.no_grad()
def teacher_forced(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """[T] token ids -> [T - 1] logprobs of each token after the first."""
    logprobs: torch.Tensor = model(tokens[None, :-1]).logits[0].double().log_softmax(-1)
    return logprobs.gather(1, tokens[1:, None])[:, 0]


def test_sharded_weights_with_an_index(llama: Path, tmp_path: Path) -> None:
    sharded = random_checkpoint(tmp_path, seed=17, shard_bytes=60_000, **CASES["llama"])
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    assert [done.token_ids for done in run(sharded)] == [done.token_ids for done in run(llama)]


def test_old_form_of_the_rotary_settings(tmp_path: Path) -> None:
    directory = make(tmp_path, "llama3-rope")
    new = [done.token_ids for done in run(directory)]
    scaling = {name: value for name, value in LLAMA3_ROPE.items() if name != "rope_theta"}
    edit_config(directory, rope_parameters=None, rope_theta=500.0, rope_scaling=scaling)
    assert [done.token_ids for done in run(directory)] == new
    edit_config(directory, rope_scaling=None)
    assert [done.token_ids for done in run(directory)] != new


def damage(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    """A change of the tensors as a change of the checkpoint directory."""

    def apply(directory: Path) -> None:
        file = directory / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return apply


UP = "model.layers.1.mlp.up_proj.weight"
QUERY = "model.layers.2.self_attn.q_proj.weight"


def pytorch_bin(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def drop_from_index(directory: Path) -> None:
    random_checkpoint(directory, seed=17, shard_bytes=60_000, **CASES["llama"])
    (directory / "model.safetensors").unlink()
    shard = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"][UP]
    tensors = load_file(directory / shard)
    del tensors[UP]
    save_file(tensors, directory / shard, metadata={"format": "pt"})


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (damage(lambda tensors: tensors.pop(UP)), UP),
    "missing head of an untied model": (damage(lambda tensors: tensors.pop("lm_head.weight")), "lm_head.weight"),
    "missing from a shard": (drop_from_index, UP),
    "extra": (damage(lambda tensors: tensors.update({"model.layers.3.gate": torch.ones(2)})), "model.layers.3.gate"),
    "renamed": (damage(lambda tensors: tensors.update({UP + "s": tensors.pop(UP)})), UP),
    "misshapen": (damage(lambda tensors: tensors.update({UP: tensors[UP][:-1].clone()})), UP),
    "transposed": (damage(lambda tensors: tensors.update({QUERY: tensors[QUERY][:, :32].clone()})), QUERY),
    "NaN": (damage(lambda tensors: tensors[UP].view(-1)[5:6].fill_(float("nan"))), UP),
    "infinite": (damage(lambda tensors: tensors[UP].view(-1)[5:6].fill_(float("inf"))), UP),
    "minus infinite": (damage(lambda tensors: tensors[UP].view(-1)[5:6].fill_(float("-inf"))), UP),
    "another vocabulary": (lambda directory: edit_config(directory, vocab_size=97), "model.embed_tokens.weight"),
    "fewer layers": (lambda directory: edit_config(directory, num_hidden_layers=2), r"model\.layers\.2\."),
    "unknown architecture": (lambda directory: edit_config(directory, architectures=["OdderLM"]), "OdderLM"),
    "no architecture": (lambda directory: edit_config(directory, architectures=None), "architectures"),
    "unknown rope": (lambda directory: edit_config(directory, rope_parameters={"rope_type": "yarn"}), "yarn"),
    "unknown activation": (lambda directory: edit_config(directory, hidden_act="gelu"), "hidden_act='gelu'"),
    "quantised": (lambda directory: edit_config(directory, quantization_config={"bits": 4}), "quantization_config"),
    "pickled": (pytorch_bin, "only safetensors"),
    "no config": (lambda directory: (directory / "config.json").unlink(), "config.json"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_checkpoints_that_do_not_fit_are_refused(fault: str, copy: Path) -> None:
    spoil, named = FAULTS[fault]
    spoil(copy)
    with pytest.raises(ValueError, match=named):
        factory_of("reference").start(EngineSetup(target=copy))
