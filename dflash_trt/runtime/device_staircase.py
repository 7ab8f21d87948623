"""The candidates of a step as tensors of fixed shape: what `staircase.py` and `drafter.Block` do, on the device.

Everything is computed for all rows of the batch at once, without a shape or a branch that depends on data: what a row
does not use is padding. Sizes are those of the host loop, so both put the same candidates before the target. Equal
siblings are not merged: `ops.accepted_path.accept_path` takes the deepest accepted node of all chains, which is as deep
as the walk over the merged tree goes.

B rows, S tokens of a first block, V of a branch, R branches, N nodes; int64 unless said otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F


class DeviceBlock(NamedTuple):
    """What a drafter is asked to fill, as `drafter.Block` for every row: R candidates of `width` tokens, one after the
    other.

    ids, offsets [B, R * width]: tokens, and positions counted from the anchor's; padding is a mask token at offset 0.
    visibility bool [B, R * width, R * width]: a candidate sees itself, a padding token only itself.
    own bool [B, R * width]: what is not padding.
    """

    ids: torch.Tensor
    offsets: torch.Tensor
    visibility: torch.Tensor
    own: torch.Tensor


class Branches(NamedTuple):
    """The prefixes that are re-drafted: kept [B, R], the drafts each keeps, ascending; used bool [B, R], whether there
    is such a branch. Of a row, those that are used come first."""

    kept: torch.Tensor
    used: torch.Tensor


class DeviceTree(NamedTuple):
    """Candidate trees padded to N nodes: tokens, parents, depths [B, N]; visibility bool [B, N, N], a node sees its
    ancestors and itself; total [B], the nodes that are not padding.

    Padding carries the anchor at depth 0 and sees only itself.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    visibility: torch.Tensor
    total: torch.Tensor


def blocks(known: torch.Tensor, branches: Branches, size: torch.Tensor, width: int, mask_token_id: int) -> DeviceBlock:
    """Candidates that keep the anchor and some drafts, the rest to be filled.

    Args:
        known: [B, M], M <= width: the anchor and the drafts there are.
        size: [B], tokens of a candidate that are not padding, at most `width`.
    """
    batch, rows = branches.kept.shape
    places = torch.arange(width, device=known.device)
    own = branches.used[:, :, None] & (places < size[:, None, None])
    padded = F.pad(known, (0, width - known.shape[1]), value=mask_token_id)[:, None]
    ids = torch.where(own & (places <= branches.kept[:, :, None]), padded, mask_token_id)
    offsets = torch.where(own, places, 0)
    tokens = torch.arange(rows * width, device=known.device)
    together = tokens[:, None] // width == tokens // width
    own = own.reshape(batch, -1)
    visibility = (own[:, :, None] & own[:, None] & together) | (tokens[:, None] == tokens)
    return DeviceBlock(ids.reshape(batch, -1), offsets.reshape(batch, -1), visibility, own)


def first_block(anchor: torch.Tensor, size: torch.Tensor, width: int, mask_token_id: int) -> DeviceBlock:
    """The blocks of the first draft: the anchor [B] and masks, `size` [B] tokens in all."""
    only = torch.zeros_like(anchor[:, None])
    return blocks(anchor[:, None], Branches(only, only == 0), size, width, mask_token_id)


def choose_branches(
    confidence: torch.Tensor, size: torch.Tensor, redraft_size: torch.Tensor, count: int, extend: bool
) -> Branches:
    """The `count` likeliest prefixes and the trunk's extension: `branching.FixedBranches.choose`.

    In float64 as on the host. A GPU multiplies up the running product in another order, so prefixes whose r(i) differ
    by rounding alone may change places there, which changes no output token.

    Args:
        confidence: float32 [B, S - 1], of the trunk's drafts.
        size, redraft_size: [B], tokens of the row's trunk and of its branches, their anchor included.
        count: at most S - 1.
        extend: whether there is a last branch that keeps the whole trunk, used where redraft_size > size.
    """
    drafts = confidence.shape[1]
    right = confidence.double().clamp(0, 1)
    before = F.pad(right.cumprod(-1)[:, :-1], (1, 0), value=1.0)
    places = torch.arange(drafts, device=confidence.device)
    there = places < size[:, None] - 1
    posterior = torch.where(there, before * (1 - right), -1.0)  # what is not there is chosen last
    likeliest = (-posterior).argsort(stable=True, dim=-1)[:, :count]
    used = places[:count] < size[:, None] - 1
    kept = torch.where(used, likeliest, drafts).sort(-1).values
    if not extend:
        return Branches(kept, used)
    longer = (redraft_size > size)[:, None]
    return Branches(F.pad(kept, (0, 1), value=drafts), torch.cat((used, longer), dim=1))


def chain(trunk: torch.Tensor, size: torch.Tensor) -> DeviceTree:
    """The tree of a trunk alone [B, S], of which `size` [B] tokens count."""
    nodes = torch.arange(trunk.shape[1], device=trunk.device).repeat(len(trunk), 1)
    there = nodes < size[:, None]
    seen = torch.where(there, nodes, -1)
    depths = torch.where(there, nodes, 0)
    return DeviceTree(trunk.gather(1, depths), nodes - 1, depths, _visibility(seen, nodes, nodes), size)


def staircase(
    trunk: torch.Tensor,
    size: torch.Tensor,
    branches: Branches,
    redraft: torch.Tensor,
    redraft_size: torch.Tensor,
    nodes: int,
) -> DeviceTree:
    """A trunk, and behind it the tail of each branch, hanging where its kept drafts end.

    Args:
        trunk: [B, S], the anchor and the first draft.
        redraft: [B, R, V], what was drafted in each place of each branch; that of kept places is ignored.
        size, redraft_size: [B], as of `choose_branches`.
        nodes: N; all rows' nodes fit (`Limits.tree_size`).
    """
    (batch, rows), width = branches.kept.shape, redraft.shape[-1]
    tails = torch.where(branches.used, redraft_size[:, None] - 1 - branches.kept, 0).clamp(min=0)
    ends = size[:, None] + tails.cumsum(-1)
    node = torch.arange(nodes, device=trunk.device).repeat(batch, 1)
    owner = torch.searchsorted(ends, node, right=True)  # the first branch that ends behind the node; R for padding
    on_trunk = node < size[:, None]
    on_tail = ~on_trunk & (owner < rows)
    branch = owner.clamp(max=rows - 1)
    start, kept = (ends - tails).gather(1, branch), branches.kept.gather(1, branch)
    # place: in the candidate, which is also the depth
    place = torch.where(on_tail, kept + 1 + node - start, 0)
    redrafted = redraft.flatten(1).gather(1, branch * width + place)
    on_path = torch.where(on_trunk, node, 0)
    return DeviceTree(
        tokens=torch.where(on_tail, redrafted, trunk.gather(1, on_path)),
        parents=torch.where(on_tail & (node == start), kept, node - 1),
        depths=on_path + place,
        visibility=_visibility(
            torch.where(on_trunk, node, torch.where(on_tail, kept, -1)), torch.where(on_tail, start, node), node
        ),
        total=ends[:, -1],
    )


def _visibility(shared: torch.Tensor, start: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
    """bool [B, N, N]: node n sees the trunk's nodes 0 .. shared and those of its own tail, start .. n; each [B, N]."""
    other = node[:, None]
    return (other <= shared[:, :, None]) | ((other >= start[:, :, None]) & (other <= node[:, :, None]))
