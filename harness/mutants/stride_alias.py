"""Stride/alias: the right data is there, the wrong rows are read, or two readers hold one storage."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant

_WATCHERS = ("SCHED-1", "SCHED-3", "EQUAL-1", "EQUAL-2", "FINISH-1")
"""Compare hidden rows with those of another run."""

MUTANTS = (
    Mutant(
        id="verify-rows-read-as-one-per-request",
        fault="Row i of the strided verify tensor [N * num_draft_tokens, width] is taken for request i's first row.",
        bugs=("B048",),
        lanes=("EAGLE3", "STANDALONE", "EAGLE-tree"),
        live="two requests or more with hidden states",
        red=("ALIAS-1",),
        may=_WATCHERS,
        edits=(
            Edit(
                "reference_engine.output",
                """        elif request.return_hidden_states and path is not None:
            window = index * result.stride
""",
                """        elif request.return_hidden_states and path is not None:
            window = index
""",
            ),
        ),
    ),
    Mutant(
        id="accepted-rows-read-by-request-index",
        fault="The accepted rows lie flat, [sum(accept lengths), width], and request i reads on from row i.",
        bugs=("B034",),
        lanes=("FROZEN_KV_MTP", "EAGLE", "EAGLE-tree"),
        live="two requests or more with hidden states, and an accept length above 1 before the last of them",
        red=("ALIAS-1",),
        may=_WATCHERS,
        edits=(
            Edit(
                "reference_engine.output",
                """            window = index * result.stride
            decode_hidden = tuple(result.hidden[window + node].clone() for node in path[: len(tokens)])
""",
                """            paths = result.accept_index.tolist()
            flat = [row * result.stride + node for row, nodes in enumerate(paths) for node in nodes if node >= 0]
            decode_hidden = tuple(result.hidden[flat[index + place]].clone() for place in range(len(tokens)))
""",
            ),
        ),
    ),
    Mutant(
        id="cached-prefix-shifts-kept-rows",
        fault="Kept rows are counted from the first page that a request computed itself: a cached prefix shifts them.",
        bugs=("B038",),
        lanes=("EXTRACT",),
        live="a prefix hit",
        red=("ALIAS-1",),
        edits=(
            Edit(
                "reference_engine.engine",
                "        return self.drafter.layer_states(request.pages, num_rows)",
                """        own = request.num_cached // self.config.page_size
        return self.drafter.layer_states(request.pages[own:] + request.pages[:own], num_rows)""",
            ),
        ),
    ),
    Mutant(
        id="rows-without-drafts-skipped-when-combined",
        fault="Requests without drafts are left out when drafts are put together, so the drafts behind them move up.",
        bugs=("B041",),
        lanes=("CUSTOM", "STANDALONE", "MEDUSA"),
        live="a request that drafts nothing, or still prefills, beside one that drafts",
        red=("ACCEPT-1",),
        may=("ACCEPT-2", "EQUAL-2", "LAW-3", "SCHED-1", "SCHED-3", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.runner",
                "        pool.draft_tokens[rows[:size], :width] = drafts[:size]\n",
                """        drafting = [row for row, limit in enumerate(plan.limits) if limit]
        pool.draft_tokens[rows[: len(drafting)], :width] = drafts[drafting]
""",
            ),
        ),
    ),
    Mutant(
        id="nothing-accepted-is-index-minus-one",
        fault="A step without drafts counts 0 accepted tokens, and state 0 - 1 of its window is the neighbour's.",
        bugs=("B039",),
        lanes=("NGRAM", "STANDALONE", "MTP"),
        live="a target with recurrent state, two requests or more",
        red=("STATE-1",),
        may=("ALIAS-1", "EQUAL-1", "EQUAL-2", "ACCEPT-1", "LOGP-1", "SCHED-1", "SCHED-3", "FINISH-1"),
        edits=(
            Edit(
                "reference_engine.runner",
                "        accepted = verdict.accept_index[:size], verdict.accept_lens[:size]\n",
                """        drafted = (target.draft_tokens >= 0).any(dim=1)
        accepted = verdict.accept_index[:size], torch.where(drafted, verdict.accept_lens, 0)[:size]
""",
            ),
            Edit(
                "reference_engine.cache.recurrent",
                "        last = path.gather(1, (lens - 1)[:, None])[:, 0]\n",
                "",
            ),
            Edit(
                "reference_engine.cache.recurrent",
                "            self.states[layer, rows] = after[requests, last]\n",
                "            self.states[layer, rows] = after.flatten(0, 1)[requests * after.shape[1] + lens - 1]\n",
            ),
        ),
    ),
    Mutant(
        id="hidden-rows-are-views",
        fault="Delivered hidden rows are views of the step's tensor: writing to one, or the next step, changes others.",
        bugs=("B037",),
        lanes=("EAGLE", "STANDALONE", "EAGLE-tree"),
        red=("ALIAS-2",),
        may=("CONF-1",),
        edits=(
            Edit(
                "reference_engine.output",
                "decode_hidden = tuple(result.hidden[window + node].clone() for node in path[: len(tokens)])",
                "decode_hidden = tuple(result.hidden[window + node] for node in path[: len(tokens)])",
            ),
        ),
    ),
    Mutant(
        id="rows-of-a-block-in-one-storage",
        fault="The rows of a block are gathered at once and handed out one by one, all of them in one storage.",
        bugs=("B037",),
        lanes=("STANDALONE", "EAGLE-tree"),
        live="an accept length above 1",
        red=("ALIAS-2",),
        may=("CONF-1",),
        edits=(
            Edit(
                "reference_engine.output",
                "decode_hidden = tuple(result.hidden[window + node].clone() for node in path[: len(tokens)])",
                "decode_hidden = tuple(result.hidden[[window + node for node in path[: len(tokens)]]])",
            ),
        ),
    ),
    Mutant(
        id="prompt-block-is-a-view",
        fault="The rows of a prompt that took one chunk are handed out without a copy: a view of the batch's rows.",
        bugs=("B035",),
        lanes=("MEDUSA", "none"),
        live="two prompts in one batch, of a single chunk",
        red=("ALIAS-2",),
        may=("CONF-1",),
        edits=(
            Edit(
                "reference_engine.output",
                "request.prefill_hidden.append(result.hidden[first : first + length].clone())",
                "request.prefill_hidden.append(result.hidden[first : first + length])",
            ),
            Edit(
                "reference_engine.output",
                "            prefill_hidden = torch.cat(request.prefill_hidden)\n",
                """            chunks = request.prefill_hidden
            prefill_hidden = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
""",
            ),
        ),
    ),
    Mutant(
        id="no-drafts-is-one-cell",
        fault="Where nothing is drafted, the proposal is a single cell expanded to its shape: strides of 0.",
        bugs=("B037",),
        lanes=("DFLASH", "STANDALONE", "EAGLE"),
        live="a prefill of several chunks",
        red=("ALIAS-2",),
        may=("CONF-1",),
        edits=(
            Edit(
                "reference_engine.drafters.base",
                "inputs.rows.new_full((len(inputs.rows), inputs.num_drafts), PLACEHOLDER)",
                "inputs.rows.new_full((1, 1), PLACEHOLDER).expand(len(inputs.rows), inputs.num_drafts)",
            ),
        ),
    ),
)
