"""Settings of the gateway."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.gateway.chat.output import ReasoningSetting, ToolSetting
from shared.settings import Addresses, AdminPort, ItlSlo, Settings, TraceEndpoint, TraceRatio, TtftSlo

MAX_TIMEOUT_S = 2e6  # in milliseconds what a socket and a message hold: three weeks
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[\x21-\x7e]+$")]  # printable ASCII, no blanks


class GatewaySettings(Settings):
    """`LOCKSTEP_GATEWAY_*`, set by the chart or the launcher; read once, in `main`."""

    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_GATEWAY_")

    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 lets the kernel pick.")
    admin_port: AdminPort = 9100
    scheduler: Addresses = Field(
        ["127.0.0.1:7100"],
        min_length=1,
        max_length=16,
        description="Address host:port of a scheduler, of which one leads; repeatable, in the variable separated by commas.",
    )
    scheduler_wait_s: float = Field(30.0, ge=0, description="How long requests are held while no scheduler leads.")
    served_model_name: list[Name] = Field(
        min_length=1, max_length=32, description="A name that clients may ask for; repeat it for aliases. The first is the default."
    )
    generation_config: Literal["ignore", "apply"] = Field(
        "ignore", description="apply: the model's generation_config.json gives the temperature and so on that a request leaves out."
    )
    max_body_bytes: int = Field(8 << 20, ge=1024, description="A larger request body is answered 413.")
    max_bodies_bytes: int = Field(
        256 << 20, ge=1024, description="Of all bodies that this process reads or tokenises; more are answered 429."
    )
    body_timeout_s: float = Field(30.0, gt=0, description="A request whose body has not come after this long is answered 408.")
    max_requests: int = Field(1024, ge=1, description="POST requests in work at a time in this process; more are answered 429.")
    max_unread_tokens: int = Field(16_384, ge=1, description="A client that leaves this many tokens unread loses its request.")
    tokenizer_threads: int = Field(2, ge=1, le=64, description="Threads that render and tokenise prompts.")
    keep_alive_s: float = Field(15.0, gt=0, description="A stream that is silent for this long gets a comment frame.")
    first_token_timeout_s: float = Field(300.0, gt=0, description="A request without any token after this long is ended with an error.")
    idle_timeout_s: float = Field(120.0, gt=0, description="An answer that does not go on for this long is ended with an error.")
    timeout_s: float = Field(600.0, gt=0, le=MAX_TIMEOUT_S, description="A request that takes longer is ended with an error.")
    drain_s: float = Field(30.0, ge=0, description="How long running answers may go on after a signal to stop.")
    api_keys: Path | None = Field(None, description="JSON file of API keys, made by 'lockstep key'; without one everybody may ask.")
    cors_origins: list[str] = Field([], max_length=32, description="A web origin whose pages may ask, like https://a.example; repeat it.")
    page: bool = Field(True, description="Serve the playground and status page at /.")
    slo_ttft_s: TtftSlo = None
    slo_itl_s: ItlSlo = None
    trace_endpoint: TraceEndpoint = None
    trace_ratio: TraceRatio = 1.0
    processes: int = Field(1, ge=1, le=64, description="Processes that share the port.")
    tool_parser: ToolSetting = Field("auto", description="How the model writes calls of tools; auto: as its chat template does.")
    reasoning_parser: ReasoningSetting = Field(
        "auto", description="Whether answers begin with <think>; auto: if the chat template says so."
    )
