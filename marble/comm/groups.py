"""Process groups from what users of torch hold: a group, or one or two dimensions of a ``DeviceMesh``."""

from __future__ import annotations

from itertools import pairwise

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh


def process_group(group: Group) -> dist.ProcessGroup:
    """The process group of all ranks of a mesh, or the group itself.

    A mesh of one dimension has one. A mesh of two is flattened, which makes a group at the first use: all ranks of the
    mesh that it was taken from must come here. torch keeps it with that mesh.

    Raises:
        TypeError: if it is neither.
        ValueError: if the mesh has other dimensions, does not hold this process, or numbers its ranks otherwise than
            the world does.
    """
    if isinstance(group, dist.ProcessGroup):
        return group
    if not isinstance(group, DeviceMesh):
        raise TypeError(
            f"group: expected a process group that this process is in, or a DeviceMesh, got {type(group).__name__}"
        )
    if group.ndim not in (1, 2):
        raise ValueError(
            f"group: the mesh has {group.ndim} dimensions; take one, the ring's, or two, the ring's and that of the "
            'ranks that share heads, as in mesh["ring", "ulysses"]'
        )
    if group.get_coordinate() is None:
        raise ValueError("group: this process is not in the mesh")
    ranks = tuple(group.mesh.flatten().tolist())
    if any(one > other for one, other in pairwise(ranks)):
        raise ValueError(
            f"group: the mesh has its ranks in the order {list(ranks)}, process groups have them ascending; build the "
            "mesh with ascending ranks"
        )
    if group.ndim == 1:
        return group.get_group()
    # Private, but what torchtitan and FSDP use: new_group names groups by how many a process knows, and would hang.
    return group._flatten().get_group()


def sharing_heads(group: Group) -> int | None:
    """How many ranks share heads: the last dimension of a mesh of two; None if the group does not say."""
    return group.size(1) if isinstance(group, DeviceMesh) and group.ndim == 2 else None
