"""Parallel prompt decoding: several tokens per forward pass, and the output of plain decoding.

One step, as in section 3 of the paper (arXiv 2405.18628):

===========  =====================================================================================
`propose`    fill the tree of each text's state with guesses, hang prompt tokens on its nodes
`forward`    one pass of the model over the tree; the mask lets a node see its own path only
`verify`     walk down from the root: while the token the model wants next is a child, go to it
`commit`     keep the KV rows of the walk, take its last node's prompt tokens for the next guesses
===========  =====================================================================================

`prefill` comes before and is the same on a flat text: prompt, then ``m`` prompt tokens, so the first step is in state
m. Plain decoding is the same loop with the one-node tree.

Positions: a root at position ``p`` has its depth-``d`` nodes at ``p + d``; prompt token ``j`` of a node at ``q`` sits
at ``q + j`` and guesses the token at ``q + j + 1``. Nothing is ever placed at or past the context limit: nodes there
hold no guess, and the next state counts only prompt tokens before it, so the tree shrinks and ends as plain decoding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppd_runtime import hf
from ppd_runtime.buffers import StateBuffers
from ppd_runtime.guesses import NO_GUESS
from ppd_runtime.prefill import prefill
from ppd_runtime.session import Clock, Session, Text, choose_trees, clear_memory_errors, enter_state, refuse_nan

__all__ = ["Pass", "Session", "Text", "Walk", "commit", "decode", "forward", "prefill", "propose", "step", "verify"]


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """The input of one forward pass over ``q`` rows for each of ``b`` texts."""

    trees: tuple[StateBuffers, ...]
    node_tokens: tuple[tuple[int, ...], ...]  # token of each node; NO_GUESS where there is none
    embeddings: Tensor  # [b, q, hidden]
    positions: Tensor  # [b, q]
    allowed: Tensor  # bool [b, q, q]: which row sees which

    @property
    def num_rows(self) -> int:
        """Rows whose logits are needed: all but the padding."""
        return max(tree.size for tree in self.trees)


@dataclass(frozen=True, slots=True)
class Walk:
    """What verification found: the rows it went through, and the token after each of them."""

    rows: tuple[int, ...]  # the root's first
    tokens: tuple[int, ...]  # the last is the next root


def decode(session: Session) -> Iterator[tuple[Text, list[int]]]:
    """Decode all texts of a session to their ends.

    Yields
    ------
    (Text, list of int)
        A text and the tokens it has just gained, at least one.

    Raises
    ------
    DecodeError
        When memory runs out or the model's own logits are not finite. The model itself is not touched and stays usable.
    """
    yield from prefill(session)
    while True:
        running = [b for b, text in enumerate(session.texts) if text.finish_reason is None]
        if not running:
            return
        if len(running) < len(session.texts):
            session.texts = [session.texts[b] for b in running]
            session.cache.keep_batch_rows(running)
        choose_trees(session)
        yield from step(session)


@torch.inference_mode()
def step(session: Session) -> list[tuple[Text, list[int]]]:
    """Propose, run, verify and commit once for every text."""
    with clear_memory_errors(session):
        clock = Clock(session)
        proposal = propose(session)
        clock.lap("propose")
        logits = forward(session, proposal)
        clock.lap("forward")
        walks = verify(session, proposal, logits)
        clock.lap("verify")
        if walks is None:  # the prompt tokens' values leaked into the nodes' (0 * nan): again without them
            session.cache.discard()
            session.decode_plainly()
            return step(session)
        written = commit(session, proposal, logits, walks)
        clock.lap("commit")
    return written


def propose(session: Session) -> Pass:
    """Fill each text's tree.

    Returns
    -------
    Pass
        Padded to the largest pass among the texts' states.
    """
    device, trees = session.loaded.device, tuple(session.trees[text.state] for text in session.texts)
    shape = (len(trees), max(tree.pass_tokens for tree in trees))
    tokens = torch.zeros(shape, dtype=torch.long, device=device)
    positions = torch.zeros(shape, dtype=torch.long, device=device)
    allowed = torch.eye(shape[1], dtype=torch.bool, device=device).repeat(shape[0], 1, 1)
    node_tokens = []
    for b, (text, tree) in enumerate(zip(session.texts, trees, strict=True)):
        root_position = session.cache.lengths[b]
        guesses = _guesses(session, text, tree)
        guesses[0] = text.new_ids[-1]
        positions[b, : tree.pass_tokens] = root_position + tree.offsets
        if session.limit is not None:
            guesses[root_position + tree.depths >= session.limit] = NO_GUESS
        tokens[b, : tree.num_nodes] = guesses.clamp(min=0)
        allowed[b, : tree.pass_tokens, : tree.pass_tokens] = tree.mask
        node_tokens.append(tuple(guesses.tolist()))
        text.guess_logits = None
        text.steps_per_state[text.state] += 1
    if session.limit is not None:
        positions.clamp_(max=session.limit - 1)  # rows past the limit are never used, but need some position
    embeddings = hf.embed_tokens(session.loaded.model, tokens)
    for b, (text, tree) in enumerate(zip(session.texts, trees, strict=True)):
        if tree.size > tree.num_nodes:
            embeddings[b, tree.num_nodes : tree.size] = text.guesser.embeddings[tree.prompt_index]
    return Pass(trees, tuple(node_tokens), embeddings, positions, allowed)


def _guesses(session: Session, text: Text, tree: StateBuffers) -> Tensor:
    if text.guesser is None:
        return torch.full((tree.num_nodes,), NO_GUESS, device=session.loaded.device)
    if text.guess_logits is not None and bool(text.guess_logits.isnan().any()):
        session.warn_not_finite()
    return text.guesser.guess(tree, text.guess_logits)


def forward(session: Session, proposal: Pass) -> Tensor:
    """Run the pass.

    Returns
    -------
    Tensor, shape (b, rows, vocabulary)
        Logits of all rows, without padding unless shapes are fixed; the keys and values lie in the cache's window.
    """
    num_rows = proposal.positions.shape[1]
    session.cache.open(num_rows)
    if not session.cache.static:  # fixed shapes are worth the head's work on padding: one per pass size is compiled
        num_rows = proposal.num_rows
    return session.forward(
        session.loaded.model,
        inputs_embeds=proposal.embeddings,
        mask=session.cache.pass_mask(proposal.allowed),
        position_ids=proposal.positions,
        cache=session.cache,
        rows=torch.arange(num_rows, device=session.loaded.device),
    )


def verify(session: Session, proposal: Pass, logits: Tensor) -> list[Walk] | None:
    """Walk down each tree as far as the model agrees.

    Every node is asked once, whichever paths share it, and a node without a guess is nobody's child: that is what keeps
    sampling exact and padding out of the text.

    Returns
    -------
    list of Walk, or None
        None when the nodes' logits are not finite because of the prompt tokens.

    Raises
    ------
    DecodeError
        When the model's own logits are not a number.
    """
    num_nodes = max(tree.num_nodes for tree in proposal.trees)
    scores = logits[:, :num_nodes].float()
    best, best_tokens = scores.max(-1)  # [b, nodes]
    for b, tree in enumerate(proposal.trees):
        if bool(best[b, : tree.num_nodes].isnan().any()):
            if session.source is None:
                raise refuse_nan(session)
            session.warn_not_finite()
            return None
    greedy = best_tokens.tolist()
    return [
        _walk(text, tree, tokens, scores[b], greedy[b])
        for b, (text, tree, tokens) in enumerate(zip(session.texts, proposal.trees, proposal.node_tokens, strict=True))
    ]


def _walk(text: Text, tree: StateBuffers, tokens: Sequence[int], scores: Tensor, greedy: Sequence[int]) -> Walk:
    before = [] if text.rule.is_plain_greedy else text.token_ids
    rows, chosen = [0], []
    while True:
        row = rows[-1]
        children = {tokens[child]: child for child in tree.children[row] if tokens[child] != NO_GUESS}
        token = greedy[row] if text.rule.is_plain_greedy else text.rule.next_token(scores[row], before, children)
        chosen.append(token)
        before.append(token)
        if token not in children:
            return Walk(tuple(rows), tuple(chosen))
        rows.append(children[token])


def commit(session: Session, proposal: Pass, logits: Tensor, walks: Sequence[Walk]) -> list[tuple[Text, list[int]]]:
    """Keep what was verified and move each text to its next state.

    Returns
    -------
    list of (Text, list of int)
        The tokens each text gains: one more than the guesses accepted, fewer where the text ends among them.
    """
    session.cache.commit([walk.rows for walk in walks])
    written = []
    for b, (text, tree, walk) in enumerate(zip(session.texts, proposal.trees, walks, strict=True)):
        written.append((text, text.append(walk.tokens)))
        if text.guesser is not None and text.finish_reason is None:
            text.guesser.extend(walk.tokens)
            last = walk.rows[-1]
            first_row = tree.prompt_starts[last]
            enter_state(session, text, tree.prompt_counts[last], session.cache.lengths[b] - 1, logits[b, first_row:])
    return written
