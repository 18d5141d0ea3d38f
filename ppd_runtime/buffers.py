"""Compile a tree design into the tensors that a forward pass needs.

One pass of state ``k`` is laid out as

    root, candidates (by depth, then path) | prompt tokens, node by node | padding

so nodes are rows ``0 .. num_nodes-1``, all that counts is rows ``0 .. size-1``, and the prompt tokens of one node lie
together, prompt token by prompt token, inside each EPT by EPT. Shapes depend on the state only: built once per design,
used in every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treeopt.errors import DecodeError
from treeopt.types import SparseTree, TreeDesign

__all__ = ["StateBuffers", "compile_design", "compile_tree", "plain_buffers"]


@dataclass(frozen=True, slots=True, eq=False)
class StateBuffers:
    """The compiled tree of one state.

    Parameters
    ----------
    state : int
        ``k``; the tree's depth is at most this.
    num_nodes, size, pass_tokens : int
        Root and candidates; these and their prompt tokens; these and the padding.
    depths : LongTensor, shape (num_nodes,)
        Depth of each node; the root's is 0.
    ranks : LongTensor, shape (num_nodes,)
        Rank of each node among the guesses for its depth; the root's is 0 and means nothing.
    paths : tuple of tuple of int
        Path of each node.
    parents : tuple of int
        Row of each node's parent; -1 for the root.
    children : tuple of tuple of int
        Rows of each node's children, best rank first.
    prompt_counts, prompt_starts : tuple of int, one per node
        Prompt tokens of the node, and the row of the first of them. With guessers that need no prompt tokens the count
        is m and no row exists.
    prompt_index : LongTensor, shape (size - num_nodes,)
        Flat index ``(j - 1) * n + ept`` of the embedding in each prompt-token row.
    offsets : LongTensor, shape (pass_tokens,)
        Position of each row relative to the root's.
    mask : BoolTensor, shape (pass_tokens, pass_tokens)
        Which row may attend to which: a node to its ancestors and itself, a prompt token to its node's ancestors, its
        node and its chain, padding to itself.
    num_ranks : int
        Guesses needed per distance: 1 + the highest rank.
    """

    state: int
    num_nodes: int
    size: int
    pass_tokens: int
    depths: Tensor
    ranks: Tensor
    paths: tuple[tuple[int, ...], ...]
    parents: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]
    prompt_counts: tuple[int, ...]
    prompt_starts: tuple[int, ...]
    prompt_index: Tensor
    offsets: Tensor
    mask: Tensor
    num_ranks: int

    @property
    def depth(self) -> int:
        """Depth of the deepest candidate."""
        return len(self.paths[-1])


def compile_design(
    design: TreeDesign,
    *,
    num_distances: int,
    vocab_size: int,
    num_epts: int = 1,
    visibility: Tensor | None = None,
    device: torch.device | None = None,
) -> tuple[StateBuffers, ...]:
    """Compile every state of a design.

    Parameters
    ----------
    design : TreeDesign
        The trees.
    num_distances : int
        ``m`` of the guesses.
    vocab_size : int
        Tokens a guess can be.
    num_epts : int
        Rows per prompt token; 0 for guessers that need none.
    visibility : BoolTensor, shape (m n, m n), optional
        Which prompt-token row of one chain may attend to which, in flat order; causal by default.
    device : torch.device, optional
        Where the tensors go.

    Returns
    -------
    tuple of StateBuffers
        Entry ``k`` for state ``k``.

    Raises
    ------
    DecodeError
        When the design is for another m, for another kind of guesses, or asks for more ranks than there are tokens.
    """
    if design.num_distances != num_distances:
        raise DecodeError(
            f"tree: has states 0 to {design.num_distances}, the guesses reach distance {num_distances}; search a tree "
            f"for m = {num_distances}"
        )
    if design.tokens_per_prompt_token != num_epts:
        raise DecodeError(
            f"tree: counts {design.tokens_per_prompt_token} tokens per prompt token, the guesses need {num_epts}; "
            "search a tree with this source's acceptance table"
        )
    return tuple(
        compile_tree(
            tree,
            state,
            design.pass_tokens[state],
            vocab_size=vocab_size,
            num_epts=num_epts,
            visibility=visibility,
            device=device,
        )
        for state, tree in enumerate(design.trees)
    )


def plain_buffers(device: torch.device | None = None) -> StateBuffers:
    """Return the one-token pass of plain decoding."""
    return compile_tree(SparseTree.from_prompt_tokens({(): 0}), 0, 1, vocab_size=1, device=device)


def compile_tree(
    tree: SparseTree,
    state: int,
    pass_tokens: int,
    *,
    vocab_size: int,
    num_epts: int = 1,
    visibility: Tensor | None = None,
    device: torch.device | None = None,
) -> StateBuffers:
    """Compile one tree; see `compile_design`."""
    paths = tuple(node.path for node in tree.nodes)
    last_ranks = [path[-1] if path else 0 for path in paths]
    worst = max(range(len(paths)), key=last_ranks.__getitem__)
    if last_ranks[worst] >= vocab_size:
        raise DecodeError(
            f"tree: states.{state} asks for rank {last_ranks[worst]} in path {list(paths[worst])}, the vocabulary has "
            f"{vocab_size} tokens; search a tree with this model's acceptance table"
        )
    row_of = {path: row for row, path in enumerate(paths)}
    parents = tuple(row_of[path[:-1]] if path else -1 for path in paths)
    children: list[list[int]] = [[] for _ in paths]
    for row, parent in enumerate(parents[1:], start=1):
        children[parent].append(row)  # paths are sorted, so siblings arrive best rank first

    counts = torch.tensor([node.prompt_tokens for node in tree.nodes])
    starts = len(paths) + (counts.cumsum(0) - counts) * num_epts
    owners = torch.arange(len(paths)).repeat_interleave(counts * num_epts)
    # Flat index of each prompt-token row inside its node's chain: its place after the chain's first row.
    prompt_index = torch.arange(len(owners)) + len(paths) - starts[owners]
    depths = torch.tensor([len(path) for path in paths])
    size = len(paths) + len(owners)

    offsets = torch.zeros(pass_tokens, dtype=torch.long)
    offsets[: len(paths)] = depths
    if len(owners):
        offsets[len(paths) : size] = depths[owners] + prompt_index // num_epts + 1
    mask = torch.eye(pass_tokens, dtype=torch.bool)
    mask[:size, :size] = _visible(_ancestors(parents, tree.depth), owners, prompt_index, visibility)
    return StateBuffers(
        state=state,
        num_nodes=len(paths),
        size=size,
        pass_tokens=pass_tokens,
        depths=depths.to(device),
        ranks=torch.tensor(last_ranks, device=device),
        paths=paths,
        parents=parents,
        children=tuple(map(tuple, children)),
        prompt_counts=tuple(node.prompt_tokens for node in tree.nodes),
        prompt_starts=tuple(starts.tolist()),
        prompt_index=prompt_index.to(device),
        offsets=offsets.to(device),
        mask=mask.to(device),
        num_ranks=max(last_ranks) + 1,
    )


def _ancestors(parents: Sequence[int], depth: int) -> Tensor:
    """Return the matrix "column is the row's node or one of its ancestors", shape (nodes, nodes).

    Invariant: after i rounds every node sees its i nearest ancestors, and ``above`` is the next one.
    """
    rows = torch.arange(len(parents))
    visible = torch.eye(len(parents), dtype=torch.bool)
    above = torch.tensor(parents)
    for _ in range(depth):
        above = above.clamp(min=0)  # nodes that have arrived at the root stay there
        visible[rows, above] = True
        above = torch.tensor(parents)[above]
    return visible


def _visible(ancestors: Tensor, owners: Tensor, prompt_index: Tensor, visibility: Tensor | None) -> Tensor:
    """Extend the nodes' mask by the prompt tokens, shape (size, size)."""
    num_nodes, size = len(ancestors), len(ancestors) + len(owners)
    mask = torch.zeros((size, size), dtype=torch.bool)
    mask[:num_nodes, :num_nodes] = ancestors
    mask[num_nodes:, :num_nodes] = ancestors[owners]
    if visibility is None:
        in_chain = prompt_index[:, None] >= prompt_index[None, :]
    else:
        in_chain = visibility.cpu()[prompt_index[:, None], prompt_index[None, :]]
    mask[num_nodes:, num_nodes:] = in_chain & (owners[:, None] == owners[None, :])
    return mask
