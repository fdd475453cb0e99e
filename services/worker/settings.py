"""Settings of a worker."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.worker.weights.folder import LoadFormat
from shared.settings import AdminPort, Settings


class WorkerSettings(Settings):
    """`LOCKSTEP_WORKER_*`; read once, in `main`."""

    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_WORKER_")

    port: int = Field(7200, ge=0, le=65535, description="gRPC port; 0 lets the kernel pick.")
    admin_port: AdminPort = 9102
    model: Path = Field(description="Model folder in Hugging Face's layout: config.json, safetensors, tokenizer.")
    group: str = Field("group-0", min_length=1, max_length=64, description="Name of the worker group in logs and metrics.")
    engine: Literal["torch", "scripted"] = Field("torch", description="scripted: plays given token ids, computes nothing.")
    script: Path | None = Field(None, description="What the scripted engine plays: see services/worker/engine/scripted.py.")
    tensor_parallel_size: int = Field(1, ge=1, le=64, description="Ranks of the group, one GPU or one share of the CPUs each.")
    threads: int | None = Field(None, ge=1, description="CPU threads of each rank; default: its share of the CPUs.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="auto: float32 on a CPU, bfloat16 on a GPU.")
    load_format: LoadFormat = Field("auto", description="auto: the folder's safetensors files; random: made up, for benchmarks.")
    max_model_len: int | None = Field(None, ge=1, description="Tokens of prompt and completion together; default: what the model allows.")
    page_size: int = Field(16, ge=1, le=1024, description="Tokens of one page of the KV cache.")
    num_pages: int | None = Field(None, ge=2, description="Pages of the KV cache; default: what kv_cache_memory_bytes holds.")
    kv_cache_memory_bytes: int = Field(1 << 30, ge=1, description="Memory of each rank's KV cache.")
    max_num_seqs: int = Field(64, ge=1, le=4096, description="Requests that the group computes at a time.")
    max_step_tokens: int = Field(2048, ge=1, le=65536, description="Most tokens of one step, decodes and prefill together.")
    step_deadline_s: float = Field(60.0, gt=0, description="A step may take this long, or 10 times its estimate if that is more.")
    start_deadline_s: float = Field(1800.0, gt=0, description="Ranks that are not ready after this long end the worker.")
