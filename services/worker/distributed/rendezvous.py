"""Where the ranks of a group are, and where they meet: in a private folder on one node, at the leader's address over several."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CommunicatorKind = Literal["auto", "torch", "pynccl", "gloo"]

# LeaderWorkerSet sets these in every container of a group -> our settings, which go before them.
LEADER_WORKER_SET = {"LWS_GROUP_SIZE": "nodes", "LWS_WORKER_INDEX": "node_index", "LWS_LEADER_ADDRESS": "leader_address"}


def from_leader_worker_set(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings that a LeaderWorkerSet tells."""
    return {setting: environment[variable] for variable, setting in LEADER_WORKER_SET.items() if variable in environment}


def ranks_of(node: int, nodes: int, ranks: int) -> range:
    """Those of one node: they are numbered node by node, and the nodes divide them."""
    local = ranks // nodes
    return range(node * local, (node + 1) * local)


def rank_name(rank: int, nodes: int, ranks: int) -> str:
    """For people: "3", or "3 (node 1)" where there are several nodes."""
    return f"{rank} (node {rank * nodes // ranks})" if nodes > 1 else str(rank)


@dataclass(frozen=True)
class Rendezvous:
    url: str  # torch.distributed's init_method
    ranks: range  # those of this node

    @classmethod
    def on_one_node(cls, ranks: int, folder: Path) -> "Rendezvous":
        """folder: nobody else's, and new: a file that a dead group left behind would let ranks meet the dead."""
        return cls(f"file://{folder / 'rendezvous'}", range(ranks))

    @classmethod
    def over_nodes(cls, ranks: int, nodes: int, node_index: int, leader_address: str, leader_port: int) -> "Rendezvous":
        """Rank 0, on the leader, listens."""
        host = f"[{leader_address}]" if ":" in leader_address else leader_address
        return cls(f"tcp://{host}:{leader_port}", ranks_of(node_index, nodes, ranks))
