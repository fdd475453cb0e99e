"""Settings of the scheduler."""

from typing import Annotated, Self

from pydantic import Field, StringConstraints, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from services.scheduler.policy import PolicyName
from shared.settings import Addresses, AdminPort, ItlSlo, Settings, TraceEndpoint, TraceRatio, TtftSlo

NAME = "[a-z0-9]([-a-z0-9.]{0,250}[a-z0-9])?"  # of an object in Kubernetes


class SchedulerSettings(Settings):
    """`LOCKSTEP_SCHEDULER_*`; read once, in `main`."""

    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_SCHEDULER_")

    port: int = Field(7100, ge=0, le=65535, description="gRPC port; 0 lets the kernel pick.")
    admin_port: AdminPort = 9101
    worker: Addresses = Field([], description="Address host:port of a worker; repeatable, in the variable separated by commas.")
    worker_service: Annotated[str, StringConstraints(pattern=rf"^{NAME}/{NAME}$")] | None = Field(
        None, description="NAMESPACE/NAME of a Kubernetes Service whose pods are the workers; beside or instead of addresses."
    )
    advertise_host: str | None = Field(None, min_length=1, description="Host at which standbys reach us; default: the one we listen on.")
    served_model_name: str = Field("default", min_length=1, max_length=256, description="Label model_name of the metrics.")
    vllm_names: bool = Field(True, description="Export the engine's series under vLLM's names too.")
    slo_ttft_s: TtftSlo = None
    slo_itl_s: ItlSlo = None
    log_requests: bool = Field(False, description="Log what each request went through when it ends; else only at log level debug.")
    trace_endpoint: TraceEndpoint = None
    trace_ratio: TraceRatio = 1.0
    max_step_tokens: int = Field(
        512, ge=1, le=32768, description="Most tokens of one step, decodes and prefill together; a group may allow less."
    )
    max_waiting_requests: int = Field(1024, ge=1, description="Requests that may wait for a slot; further ones are rejected as overload.")
    max_waiting_tokens: int = Field(1_000_000, ge=1, description="Prompt tokens that may wait; one request alone may exceed it.")
    group_wait_s: float = Field(30.0, ge=0, description="How long requests are held while no worker group can take them.")
    plan_deadline_s: float = Field(
        90.0,
        gt=0,
        description="A group that has plans and has answered none for so long, or 12 times its oldest plan's estimate if that is more, "
        "is given up. Keep it above the workers' step_deadline_s, whose error says what hangs.",
    )
    leadership: Annotated[str, StringConstraints(pattern=rf"^(none|file:.+|lease:{NAME}/{NAME})$")] = Field(
        "none",
        description="Who leads, of several schedulers: none, there is one; file:FOLDER, a lease in a folder that they share; "
        "lease:NAMESPACE/NAME, a Kubernetes Lease.",
    )
    lease_duration_s: float = Field(
        3.0, gt=0, description="A leader that has not renewed its lease for so long, and does not answer, is replaced."
    )
    lease_renewal_s: float = Field(1.0, gt=0, description="How often the leader renews its lease.")
    overlap: bool = Field(True, description="Send plans ahead of results, by the lead rule; off: wait for each result.")
    bursts: bool = Field(True, description="Several iterations in one plan while steps are short; off: one.")
    jump: bool = Field(True, description="A new request's first prefill overtakes plans sent before; needs overlap.")
    policy: PolicyName = Field("mixed", description="Who comes first in a step: streams and prompts both, prompts, or streams.")
    prefix_cache: bool = Field(True, description="Keys and values of common prefixes are computed once and kept while there is room.")

    @field_validator("worker")
    @classmethod
    def each_once(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError("a worker is given twice: its two streams would take it from each other")
        return value

    @model_validator(mode="after")
    def there_are_workers(self) -> Self:
        if not self.worker and self.worker_service is None:
            raise ValueError("worker: name a worker, or the Service of all by worker_service")
        return self

    @model_validator(mode="after")
    def leader_may_miss_one_renewal(self) -> Self:
        if 2 * self.lease_renewal_s > self.lease_duration_s:
            raise ValueError(f"lease_renewal_s={self.lease_renewal_s} > lease_duration_s={self.lease_duration_s} / 2")
        return self
