"""What a target says under a grammar: the closed form of its law, masked by what the language lets follow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from numpy.typing import ArrayLike

from harness.contract import Reading, SamplingParams, json_expression, reading_of, regex_expression
from harness.oracles.sampling import History, NothingLeft, next_token_law


def canonical_grammar(params: SamplingParams) -> Reading | None:
    """The texts of a request as grammar engines write them, before the first character; None without a grammar."""
    if params.regex is not None:
        return reading_of(regex_expression(params.regex))
    if params.json_schema is not None:
        return reading_of(json_expression(params.json_schema, canonical=True))
    return None


def following_ids(reading: Reading, texts: Sequence[str], eos_token_ids: Collection[int]) -> frozenset[int]:
    """The ids that may follow what was read: `texts[id]` is what an id says, nothing for special tokens. An EOS id
    comes where the text may end, and nowhere else."""
    known: dict[str, bool] = {}
    for text in texts:
        if text not in known:
            known[text] = bool(text) and reading.lets(text)
    ids = {token_id for token_id, text in enumerate(texts) if known[text] and token_id not in eos_token_ids}
    return frozenset(ids | set(eos_token_ids if reading.complete else ()))


def masked_stream(
    logits_of: Callable[[tuple[int, ...]], ArrayLike],
    params: SamplingParams,
    prompt: tuple[int, ...],
    texts: Sequence[str],
    eos_token_ids: Collection[int],
    output: tuple[int, ...] = (),
) -> Iterator[int]:
    """What greedy decoding of a request emits behind `output`, up to its cap: after each token the best of the law
    under all of its processors and masks. It ends where these leave nothing, and with an EOS id that is not ignored.

    `logits_of` gives the raw logits (or log law) after prompt and output.
    """
    stops = {*params.stop_token_ids, *eos_token_ids}
    reading = canonical_grammar(params)
    if reading is not None:
        reading = reading.after("".join(texts[token_id] for token_id in output))
    while len(output) < params.max_new_tokens:
        ids = None if reading is None else following_ids(reading, texts, eos_token_ids)
        history = History(prompt, output)
        try:
            law = next_token_law(logits_of((*prompt, *output)), params, history, stop_ids=stops, following_ids=ids)
        except NothingLeft:
            return
        token_id = int(law.argmax())
        yield token_id
        if token_id in eos_token_ids and not params.ignore_eos:
            return
        output = (*output, token_id)
        reading = None if reading is None else reading.after(texts[token_id])
