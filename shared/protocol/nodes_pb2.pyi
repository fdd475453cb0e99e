from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodesJoinRequest(_message.Message):
    __slots__ = ("hello", "told", "heartbeat", "leaving", "standings")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    STANDINGS_FIELD_NUMBER: _ClassVar[int]
    hello: NodeHello
    told: NodeTold
    heartbeat: NodeHeartbeat
    leaving: NodeLeaving
    standings: _containers.RepeatedCompositeFieldContainer[NodeStanding]
    def __init__(self, hello: _Optional[_Union[NodeHello, _Mapping]] = ..., told: _Optional[_Union[NodeTold, _Mapping]] = ..., heartbeat: _Optional[_Union[NodeHeartbeat, _Mapping]] = ..., leaving: _Optional[_Union[NodeLeaving, _Mapping]] = ..., standings: _Optional[_Iterable[_Union[NodeStanding, _Mapping]]] = ...) -> None: ...

class NodesJoinResponse(_message.Message):
    __slots__ = ("welcome", "entries", "heartbeat", "stacks")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    welcome: NodeWelcome
    entries: NodeEntries
    heartbeat: NodeHeartbeat
    stacks: NodeStacks
    def __init__(self, welcome: _Optional[_Union[NodeWelcome, _Mapping]] = ..., entries: _Optional[_Union[NodeEntries, _Mapping]] = ..., heartbeat: _Optional[_Union[NodeHeartbeat, _Mapping]] = ..., stacks: _Optional[_Union[NodeStacks, _Mapping]] = ...) -> None: ...

class NodeHello(_message.Message):
    __slots__ = ("protocol_version", "node", "agreed")
    class AgreedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    AGREED_FIELD_NUMBER: _ClassVar[int]
    protocol_version: str
    node: int
    agreed: _containers.ScalarMap[str, str]
    def __init__(self, protocol_version: _Optional[str] = ..., node: _Optional[int] = ..., agreed: _Optional[_Mapping[str, str]] = ...) -> None: ...

class NodeWelcome(_message.Message):
    __slots__ = ("protocol_version",)
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: str
    def __init__(self, protocol_version: _Optional[str] = ...) -> None: ...

class NodeEntries(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[NodeEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[NodeEntry, _Mapping]]] = ...) -> None: ...

class NodeEntry(_message.Message):
    __slots__ = ("kind", "plan", "payload")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    kind: int
    plan: int
    payload: bytes
    def __init__(self, kind: _Optional[int] = ..., plan: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class NodeTold(_message.Message):
    __slots__ = ("rank", "message")
    RANK_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    message: bytes
    def __init__(self, rank: _Optional[int] = ..., message: _Optional[bytes] = ...) -> None: ...

class NodeStanding(_message.Message):
    __slots__ = ("moves", "place", "stopped")
    MOVES_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    moves: int
    place: int
    stopped: bool
    def __init__(self, moves: _Optional[int] = ..., place: _Optional[int] = ..., stopped: bool = ...) -> None: ...

class NodeHeartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeStacks(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeLeaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
