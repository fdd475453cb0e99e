"""Settings of a worker."""

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from services.worker.distributed.rendezvous import CommunicatorKind, from_leader_worker_set
from services.worker.engine.interface import DeviceKind
from services.worker.faults import Fault
from services.worker.weights.folder import LoadFormat
from shared.settings import AdminPort, Settings

DEADLINE_FACTOR = 10  # a step may take this many times its estimate, and a collective this many times a step's deadline


class WorkerSettings(Settings):
    """`LOCKSTEP_WORKER_*`; read once, in `main`."""

    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_WORKER_")

    port: int = Field(
        7200, ge=0, le=65535, description="gRPC port; 0 lets the kernel pick. Nodes beside the leader listen at none: it is their leader's."
    )
    admin_port: AdminPort = 9102
    model: Path = Field(description="Model folder in Hugging Face's layout: config.json, safetensors, tokenizer.")
    group: str = Field("group-0", min_length=1, max_length=64, description="Name of the worker group in logs and metrics.")
    engine: Literal["torch", "scripted", "simulated"] = Field(
        "torch", description="scripted: plays given token ids, computes nothing; simulated: keeps the timing of a GPU."
    )
    script: Path | None = Field(None, description="What the scripted engine plays: see services/worker/engine/scripted.py.")
    tensor_parallel_size: int = Field(1, ge=1, le=64, description="Ranks of the group, one GPU or one share of the CPUs each.")
    nodes: int = Field(1, ge=1, le=64, description="Nodes that share the ranks evenly; default: LWS_GROUP_SIZE.")
    node_index: int = Field(0, ge=0, description="Which of the nodes this is, 0 the leader; default: LWS_WORKER_INDEX.")
    leader_address: str | None = Field(None, min_length=1, description="Where several nodes meet; default: LWS_LEADER_ADDRESS.")
    leader_port: int = Field(29500, ge=1, le=65535, description="Port of the leader at which the ranks of several nodes meet.")
    device: DeviceKind = Field("auto", description="auto: the GPU when there is one.")
    ranks_per_gpu: int = Field(1, ge=1, le=64, description="More than one share each GPU, adding up through main memory: for tests.")
    memory_fraction: float = Field(
        0.9, gt=0, le=1, description="Of a GPU's memory, that its ranks use; the KV cache has what is left of it."
    )
    cuda_graphs: bool = Field(True, description="On a GPU: steps are replayed as CUDA graphs; false: launched kernel by kernel.")
    communicator: CommunicatorKind = Field(
        "auto", description="How ranks add up: torch (gloo, on GPUs NCCL), pynccl or gloo; auto: torch, or gloo where ranks share a GPU."
    )
    peer_memory: bool = Field(
        True, description="GPUs of one host add up small messages through each other's memory, faster than NCCL does."
    )
    sampling_gather: Literal["full", "best", "candidates"] = Field(
        "best", description="What ranks exchange to sample: all logits; for rows without filters each its best; or its best candidates."
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of each rank; default: its share of the CPUs, or of a CPU limit.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="auto: float32 on a CPU, bfloat16 on a GPU.")
    deterministic: bool = Field(
        False,
        description="A row's bits depend on its own tokens alone, not on batch, chunk or page size. Slower; on a CPU one thread a rank.",
    )
    load_format: LoadFormat = Field("auto", description="auto: the folder's safetensors files; random: made up, for benchmarks.")
    max_model_len: int | None = Field(None, ge=1, description="Tokens of prompt and completion together; default: what the model allows.")
    page_size: int = Field(16, ge=1, le=1024, description="Tokens of one page of the KV cache.")
    num_pages: int | None = Field(None, ge=2, description="Pages of the KV cache; default: what kv_cache_memory_bytes holds.")
    kv_cache_memory_bytes: int | None = Field(
        None, ge=1, description="Memory of each rank's KV cache; default: 1 GiB on a CPU, what memory_fraction leaves on a GPU."
    )
    max_num_seqs: int = Field(64, ge=1, le=4096, description="Requests that the group computes at a time.")
    max_step_tokens: int = Field(2048, ge=1, le=65536, description="Most tokens of one step, decodes and prefill together.")
    step_deadline_s: float = Field(60.0, gt=0, description="A step may take this long, or 10 times its estimate if that is more.")
    groups: int = Field(1, ge=1, le=1024, description="Groups in this process, GROUP-0, GROUP-1 ...: simulated ones only.")
    simulated_gpu: Literal["a100", "h100", "h200", "l40s"] = Field("h200", description="Whose timing the simulated engine keeps.")
    simulated_model: Literal["0.6b", "8b", "14b"] | None = Field(
        None, description="Whose size the simulated engine has; default: what the model folder's config.json says."
    )
    simulated_mean_tokens: int = Field(300, ge=0, description="Of a simulated completion that may end by itself; 0: none does.")
    simulated_faults: list[Fault] = Field([], description="Faults of simulated groups, as JSON: see docs/simulation.md.")
    drain_s: float = Field(30.0, ge=0, description="How long running requests may take to move or end after a signal to stop.")
    profile_folder: Path | None = Field(None, description="SIGUSR2 to a rank writes a trace of its next decode steps here.")
    preflight_deadline_s: float = Field(
        60.0, gt=0, description="The ranks' first sums, before weights are loaded, that take longer end the worker."
    )
    start_deadline_s: float = Field(1800.0, gt=0, description="Ranks that are not ready after this long end the worker.")

    @model_validator(mode="after")
    def ranks_spread_over_nodes(self) -> Self:
        if self.tensor_parallel_size % self.nodes:
            raise ValueError(f"tensor_parallel_size={self.tensor_parallel_size} ranks do not spread evenly over nodes={self.nodes}")
        if self.node_index >= self.nodes:
            raise ValueError(f"node_index={self.node_index} is not one of nodes={self.nodes}, counted from 0")
        if self.nodes > 1 and self.leader_address is None:
            raise ValueError(f"nodes={self.nodes} need a leader_address to meet at")
        if self.nodes > 1 and self.engine == "simulated":
            raise ValueError(f"nodes={self.nodes}, but a simulated group has no ranks to spread")
        if self.node_index and not self.port:
            raise ValueError(f"node_index={self.node_index} needs the port of its leader, got 0")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        leader_worker_set = InitSettingsSource(settings_cls, init_kwargs=dict(from_leader_worker_set(os.environ)))
        return init_settings, env_settings, leader_worker_set

    @model_validator(mode="after")
    def only_simulated_groups_share_a_process(self) -> Self:
        if self.groups > 1 and self.engine != "simulated":
            raise ValueError(f"groups={self.groups} needs engine=simulated, got {self.engine}")
        return self

    @property
    def group_names(self) -> list[str]:
        return [self.group] if self.groups == 1 else [f"{self.group}-{number}" for number in range(self.groups)]
