from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExecutionDescribeRequest(_message.Message):
    __slots__ = ("protocol_version",)
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: str
    def __init__(self, protocol_version: _Optional[str] = ...) -> None: ...

class ExecutionDescribeResponse(_message.Message):
    __slots__ = ("protocol_version", "groups")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: str
    groups: _containers.RepeatedCompositeFieldContainer[WorkerGroup]
    def __init__(self, protocol_version: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[WorkerGroup, _Mapping]]] = ...) -> None: ...

class WorkerGroup(_message.Message):
    __slots__ = ("name", "ready", "phase", "progress", "fingerprint", "tp", "page_size", "pages", "slots", "max_length", "max_step_tokens", "vocab_size", "eos_ids", "highest_epoch", "highest_stream")
    NAME_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_STREAM_FIELD_NUMBER: _ClassVar[int]
    name: str
    ready: bool
    phase: str
    progress: float
    fingerprint: str
    tp: int
    page_size: int
    pages: int
    slots: int
    max_length: int
    max_step_tokens: int
    vocab_size: int
    eos_ids: _containers.RepeatedScalarFieldContainer[int]
    highest_epoch: int
    highest_stream: int
    def __init__(self, name: _Optional[str] = ..., ready: bool = ..., phase: _Optional[str] = ..., progress: _Optional[float] = ..., fingerprint: _Optional[str] = ..., tp: _Optional[int] = ..., page_size: _Optional[int] = ..., pages: _Optional[int] = ..., slots: _Optional[int] = ..., max_length: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_ids: _Optional[_Iterable[int]] = ..., highest_epoch: _Optional[int] = ..., highest_stream: _Optional[int] = ...) -> None: ...

class ExecutionFilesRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: str
    def __init__(self, group: _Optional[str] = ...) -> None: ...

class ExecutionFilesResponse(_message.Message):
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
        files: _containers.RepeatedCompositeFieldContainer[ExecutionFilesResponse.File]
        def __init__(self, files: _Optional[_Iterable[_Union[ExecutionFilesResponse.File, _Mapping]]] = ...) -> None: ...
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    manifest: ExecutionFilesResponse.Manifest
    chunk: bytes
    def __init__(self, manifest: _Optional[_Union[ExecutionFilesResponse.Manifest, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class ExecutionExecuteRequest(_message.Message):
    __slots__ = ("hello", "plan", "heartbeat", "goodbye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    hello: ExecuteHello
    plan: bytes
    heartbeat: ExecuteHeartbeat
    goodbye: ExecuteGoodbye
    def __init__(self, hello: _Optional[_Union[ExecuteHello, _Mapping]] = ..., plan: _Optional[bytes] = ..., heartbeat: _Optional[_Union[ExecuteHeartbeat, _Mapping]] = ..., goodbye: _Optional[_Union[ExecuteGoodbye, _Mapping]] = ...) -> None: ...

class ExecutionExecuteResponse(_message.Message):
    __slots__ = ("welcome", "result", "heartbeat", "draining")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    welcome: ExecuteWelcome
    result: PlanResult
    heartbeat: ExecuteHeartbeat
    draining: Draining
    def __init__(self, welcome: _Optional[_Union[ExecuteWelcome, _Mapping]] = ..., result: _Optional[_Union[PlanResult, _Mapping]] = ..., heartbeat: _Optional[_Union[ExecuteHeartbeat, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ...) -> None: ...

class ExecuteHello(_message.Message):
    __slots__ = ("protocol_version", "group", "epoch", "stream")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    protocol_version: str
    group: str
    epoch: int
    stream: int
    def __init__(self, protocol_version: _Optional[str] = ..., group: _Optional[str] = ..., epoch: _Optional[int] = ..., stream: _Optional[int] = ...) -> None: ...

class ExecuteWelcome(_message.Message):
    __slots__ = ("protocol_version", "highest_slot_epoch")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_SLOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    protocol_version: str
    highest_slot_epoch: int
    def __init__(self, protocol_version: _Optional[str] = ..., highest_slot_epoch: _Optional[int] = ...) -> None: ...

class ExecuteGoodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ExecuteHeartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PlanResult(_message.Message):
    __slots__ = ("plan", "epoch", "stream", "iterations", "ids", "slot_epochs", "hold_us", "start_us", "end_us", "idle_us", "logprobs")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    SLOT_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    HOLD_US_FIELD_NUMBER: _ClassVar[int]
    START_US_FIELD_NUMBER: _ClassVar[int]
    END_US_FIELD_NUMBER: _ClassVar[int]
    IDLE_US_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    plan: int
    epoch: int
    stream: int
    iterations: int
    ids: bytes
    slot_epochs: bytes
    hold_us: int
    start_us: int
    end_us: int
    idle_us: int
    logprobs: bytes
    def __init__(self, plan: _Optional[int] = ..., epoch: _Optional[int] = ..., stream: _Optional[int] = ..., iterations: _Optional[int] = ..., ids: _Optional[bytes] = ..., slot_epochs: _Optional[bytes] = ..., hold_us: _Optional[int] = ..., start_us: _Optional[int] = ..., end_us: _Optional[int] = ..., idle_us: _Optional[int] = ..., logprobs: _Optional[bytes] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("remaining_ms",)
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    remaining_ms: int
    def __init__(self, remaining_ms: _Optional[int] = ...) -> None: ...
