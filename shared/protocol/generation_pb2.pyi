from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
    FINISH_REASON_UNAVAILABLE: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE: _ClassVar[FinishReason]

class RejectReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REJECT_REASON_UNSPECIFIED: _ClassVar[RejectReason]
    REJECT_REASON_INVALID: _ClassVar[RejectReason]
    REJECT_REASON_TOO_LONG: _ClassVar[RejectReason]
    REJECT_REASON_OVERLOADED: _ClassVar[RejectReason]
    REJECT_REASON_DEADLINE: _ClassVar[RejectReason]
    REJECT_REASON_UNAVAILABLE: _ClassVar[RejectReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_ERROR: FinishReason
FINISH_REASON_UNAVAILABLE: FinishReason
FINISH_REASON_DEADLINE: FinishReason
REJECT_REASON_UNSPECIFIED: RejectReason
REJECT_REASON_INVALID: RejectReason
REJECT_REASON_TOO_LONG: RejectReason
REJECT_REASON_OVERLOADED: RejectReason
REJECT_REASON_DEADLINE: RejectReason
REJECT_REASON_UNAVAILABLE: RejectReason

class GenerationDescribeRequest(_message.Message):
    __slots__ = ("protocol_version",)
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: str
    def __init__(self, protocol_version: _Optional[str] = ...) -> None: ...

class GenerationDescribeResponse(_message.Message):
    __slots__ = ("protocol_version", "fingerprint", "epoch", "vocab_size", "max_length", "eos_ids")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: str
    fingerprint: str
    epoch: int
    vocab_size: int
    max_length: int
    eos_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, protocol_version: _Optional[str] = ..., fingerprint: _Optional[str] = ..., epoch: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_length: _Optional[int] = ..., eos_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerationFilesRequest(_message.Message):
    __slots__ = ("fingerprint",)
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    def __init__(self, fingerprint: _Optional[str] = ...) -> None: ...

class GenerationFilesResponse(_message.Message):
    __slots__ = ("manifest", "chunk")
    class File(_message.Message):
        __slots__ = ("name", "size", "sha256")
        NAME_FIELD_NUMBER: _ClassVar[int]
        SIZE_FIELD_NUMBER: _ClassVar[int]
        SHA256_FIELD_NUMBER: _ClassVar[int]
        name: str
        size: int
        sha256: str
        def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...
    class Manifest(_message.Message):
        __slots__ = ("files",)
        FILES_FIELD_NUMBER: _ClassVar[int]
        files: _containers.RepeatedCompositeFieldContainer[GenerationFilesResponse.File]
        def __init__(self, files: _Optional[_Iterable[_Union[GenerationFilesResponse.File, _Mapping]]] = ...) -> None: ...
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    manifest: GenerationFilesResponse.Manifest
    chunk: bytes
    def __init__(self, manifest: _Optional[_Union[GenerationFilesResponse.Manifest, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class GenerationSessionRequest(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "heartbeat", "submits")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    hello: SessionHello
    submit: Submit
    cancel: Cancel
    heartbeat: SessionHeartbeat
    submits: Submits
    def __init__(self, hello: _Optional[_Union[SessionHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., heartbeat: _Optional[_Union[SessionHeartbeat, _Mapping]] = ..., submits: _Optional[_Union[Submits, _Mapping]] = ...) -> None: ...

class GenerationSessionResponse(_message.Message):
    __slots__ = ("welcome", "batch", "heartbeat")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    welcome: SessionWelcome
    batch: TokenBatch
    heartbeat: SessionHeartbeat
    def __init__(self, welcome: _Optional[_Union[SessionWelcome, _Mapping]] = ..., batch: _Optional[_Union[TokenBatch, _Mapping]] = ..., heartbeat: _Optional[_Union[SessionHeartbeat, _Mapping]] = ...) -> None: ...

class SessionHello(_message.Message):
    __slots__ = ("protocol_version", "gateway", "highest_epoch")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    protocol_version: str
    gateway: str
    highest_epoch: int
    def __init__(self, protocol_version: _Optional[str] = ..., gateway: _Optional[str] = ..., highest_epoch: _Optional[int] = ...) -> None: ...

class SessionWelcome(_message.Message):
    __slots__ = ("protocol_version", "epoch")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    protocol_version: str
    epoch: int
    def __init__(self, protocol_version: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class SessionHeartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "bias_ids", "bias_values")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bias_ids: bytes
    bias_values: bytes
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., bias_ids: _Optional[bytes] = ..., bias_values: _Optional[bytes] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request", "attempt", "request_id", "prompt_ids", "delivered_ids", "sampling", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "priority", "tenant", "deadline_ms", "traceparent", "cache_salt", "logprobs", "prompt_logprobs", "age_ms", "unplanned_moves")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    UNPLANNED_MOVES_FIELD_NUMBER: _ClassVar[int]
    request: int
    attempt: int
    request_id: str
    prompt_ids: bytes
    delivered_ids: bytes
    sampling: Sampling
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: bytes
    priority: int
    tenant: str
    deadline_ms: int
    traceparent: str
    cache_salt: str
    logprobs: int
    prompt_logprobs: int
    age_ms: int
    unplanned_moves: int
    def __init__(self, request: _Optional[int] = ..., attempt: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_ids: _Optional[bytes] = ..., delivered_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: bool = ..., stop_token_ids: _Optional[bytes] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., deadline_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., cache_salt: _Optional[str] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., age_ms: _Optional[int] = ..., unplanned_moves: _Optional[int] = ...) -> None: ...

class Submits(_message.Message):
    __slots__ = ("submits",)
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    def __init__(self, submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request", "attempt", "accepted_tokens", "reason")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request: int
    attempt: int
    accepted_tokens: int
    reason: FinishReason
    def __init__(self, request: _Optional[int] = ..., attempt: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("tokens", "finished", "rejected")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Tokens]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    rejected: _containers.RepeatedCompositeFieldContainer[Rejected]
    def __init__(self, tokens: _Optional[_Iterable[_Union[Tokens, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., rejected: _Optional[_Iterable[_Union[Rejected, _Mapping]]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("request", "attempt", "first_index", "ids", "cached_tokens", "logprobs", "prompt_logprobs", "first_position", "unplanned_moves")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    UNPLANNED_MOVES_FIELD_NUMBER: _ClassVar[int]
    request: int
    attempt: int
    first_index: int
    ids: bytes
    cached_tokens: int
    logprobs: Logprobs
    prompt_logprobs: Logprobs
    first_position: int
    unplanned_moves: int
    def __init__(self, request: _Optional[int] = ..., attempt: _Optional[int] = ..., first_index: _Optional[int] = ..., ids: _Optional[bytes] = ..., cached_tokens: _Optional[int] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., first_position: _Optional[int] = ..., unplanned_moves: _Optional[int] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("values", "top", "top_ids", "top_values")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_VALUES_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    top: int
    top_ids: bytes
    top_values: bytes
    def __init__(self, values: _Optional[bytes] = ..., top: _Optional[int] = ..., top_ids: _Optional[bytes] = ..., top_values: _Optional[bytes] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("request", "attempt", "reason", "completion_tokens", "cached_tokens", "detail")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    request: int
    attempt: int
    reason: FinishReason
    completion_tokens: int
    cached_tokens: int
    detail: str
    def __init__(self, request: _Optional[int] = ..., attempt: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("request", "attempt", "reason", "detail", "retry_after_ms")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    request: int
    attempt: int
    reason: RejectReason
    detail: str
    retry_after_ms: int
    def __init__(self, request: _Optional[int] = ..., attempt: _Optional[int] = ..., reason: _Optional[_Union[RejectReason, str]] = ..., detail: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class GenerationStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GenerationStatusResponse(_message.Message):
    __slots__ = ("waiting", "groups")
    class Group(_message.Message):
        __slots__ = ("name", "ready", "running", "waiting", "kv_usage", "prompt_tokens", "cached_tokens", "generation_tokens")
        NAME_FIELD_NUMBER: _ClassVar[int]
        READY_FIELD_NUMBER: _ClassVar[int]
        RUNNING_FIELD_NUMBER: _ClassVar[int]
        WAITING_FIELD_NUMBER: _ClassVar[int]
        KV_USAGE_FIELD_NUMBER: _ClassVar[int]
        PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
        name: str
        ready: bool
        running: int
        waiting: int
        kv_usage: float
        prompt_tokens: int
        cached_tokens: int
        generation_tokens: int
        def __init__(self, name: _Optional[str] = ..., ready: bool = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_usage: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generation_tokens: _Optional[int] = ...) -> None: ...
    WAITING_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    groups: _containers.RepeatedCompositeFieldContainer[GenerationStatusResponse.Group]
    def __init__(self, waiting: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GenerationStatusResponse.Group, _Mapping]]] = ...) -> None: ...
