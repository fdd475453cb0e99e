"""What clients send. Types are strict, null means absent, unknown keys are ignored; `validation.py` turns faults into OpenAI's errors."""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticKnownError

from shared.protocol.logprobs import MAX_TOP_LOGPROBS
from shared.protocol.plan import MAX_BIAS, MAX_BIASES, MAX_PENALTY, MAX_REPETITION, MAX_STOP_IDS

MAX_CHOICES = 128  # of one request: prompts times n
MAX_MESSAGES = 16_384
MAX_TOOLS = 1024
MAX_METADATA = 16
MAX_TEMPLATE_VARIABLES = 32
MAX_STOP_CHARACTERS = 1000
INT32_MAX = 2**31 - 1

# Names of union members in pydantic's error locations; in angle brackets, so that they are told from the client's field names.
TEXT, PARTS, TEXTS, IDS, ID_LISTS, OBJECT = "<text>", "<parts>", "<texts>", "<ids>", "<id lists>", "<object>"
REFUSAL = "<refusal>"


def _tell_of_null(schema: dict[str, Any]) -> None:
    """In the OpenAPI document: what may be left out may also be null."""
    for name, value in schema.get("properties", {}).items():
        if name not in schema.get("required", ()) and {"type": "null"} not in value.get("anyOf", ()):
            schema["properties"][name] = {"anyOf": [value, {"type": "null"}]}


class Body(BaseModel):
    """The base of everything in a request."""

    prompt_field: ClassVar[str] = ""  # of a whole body that becomes a prompt: the field that holds it
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, json_schema_extra=_tell_of_null)

    @model_validator(mode="before")
    @classmethod
    def null_is_absent(cls, data: Any) -> Any:
        """Clients send null for what they leave to us."""
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class TextPart(Body):
    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """What an assistant has said instead of what it was asked for."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def _part_kind(value: Any) -> str:
    return REFUSAL if isinstance(value, dict) and value.get("type") == "refusal" else TEXT


Part = Annotated[Annotated[TextPart, Tag(TEXT)] | Annotated[RefusalPart, Tag(REFUSAL)], Discriminator(_part_kind)]


class FunctionCall(Body):
    name: str
    arguments: str = "{}"


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


def _told_by(kind: Callable[[Any], str | None], wanted: str) -> Discriminator:
    """Chooses among the members of a union; for a value that is of none the error tells what is wanted."""
    return Discriminator(kind, custom_error_type="wrong_kind", custom_error_message=f"Input should be {wanted}")


def _content_kind(value: Any) -> str | None:
    return TEXT if isinstance(value, str) else PARTS if isinstance(value, list) else None


class ChatMessage(Body):
    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: (
        Annotated[
            Annotated[str, Tag(TEXT)] | Annotated[list[Part], Field(fail_fast=True), Tag(PARTS)],
            _told_by(_content_kind, "a string or a list of parts"),
        ]
        | None
    ) = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = Field(None, description="Or, as some call it, reasoning.")
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None  # refused: templates know tool_calls only

    @model_validator(mode="before")
    @classmethod
    def reasoning_has_two_names(cls, data: Any) -> Any:
        """Of what others than strings `reasoning` may hold we know nothing."""
        if isinstance(data, dict) and data.get("reasoning_content") is None and isinstance(data.get("reasoning"), str):
            return {**data, "reasoning_content": data["reasoning"]}
        return data

    @property
    def text(self) -> str:
        """The content or, where there is none, the refusal that stands for it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or [])
        return content or self.refusal or ""


class Function(Body):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function


class FunctionChoice(Body):
    name: str


class ToolChoice(Body):
    type: Literal["function", "allowed_tools", "custom"]
    function: FunctionChoice | None = None


class StreamOptions(Body):
    include_usage: bool = False


class JSONSchemaFormat(Body):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchemaFormat | None = None


def _stop_kind(value: Any) -> str | None:
    return TEXT if isinstance(value, str) else TEXTS if isinstance(value, list) else None


def _tool_choice_kind(value: Any) -> str | None:
    return TEXT if isinstance(value, str) else OBJECT if isinstance(value, dict) else None


def _at_most(limit: int) -> BeforeValidator:
    """Bounds an object before its values are looked at: each wrong one would cost an error."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise PydanticKnownError("too_long", {"field_type": "Dictionary", "max_length": limit, "actual_length": len(value)})
        return value

    return BeforeValidator(check)


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TemplateVariable = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]
TemplateWord = Annotated[str, Field(max_length=64)]
TemplateValue = Annotated[str, Field(max_length=1000)] | int | float | bool | None
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class ModelRequest(Body):
    """What every route with a body takes."""

    model: Annotated[str, Field(min_length=1)] | None = None


class GenerationRequest(ModelRequest):
    """What both endpoints of generation take."""

    model: str = Field(min_length=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    presence_penalty: float = Field(0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: float = Field(0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]], _at_most(MAX_BIASES)] = {}
    stop: (
        Annotated[
            Annotated[StopString, Tag(TEXT)] | Annotated[list[StopString], Field(fail_fast=True, max_length=4), Tag(TEXTS)],
            _told_by(_stop_kind, "a string or a list of strings"),
        ]
        | None
    ) = None
    # Beyond OpenAI's
    top_k: int = Field(-1, ge=-1, le=INT32_MAX, description="-1 and 0 are off.")
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=1 / MAX_REPETITION, le=MAX_REPETITION)
    min_tokens: int = Field(0, ge=0)
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] = Field([], max_length=MAX_STOP_IDS)
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        None, description="Prefixes in the cache are shared among requests of the same salt only."
    )
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    # Taken without effect
    user: str | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], _at_most(MAX_METADATA)] = {}
    response_format: ResponseFormat | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def candidates(self) -> int:
        """Choices that are computed for each prompt."""
        return self.n

    @property
    def completion_scores(self) -> int | None:
        """So many likeliest ids are needed for each token of the completion; None: not even log-probabilities."""
        return None

    @property
    def prompt_scores(self) -> int | None:
        """The same for each token of the prompt."""
        return None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ConversationRequest(Body):
    """What a chat template is rendered with."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)] = Field(min_length=1)
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = Field(None, min_length=1)
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag(TEXT)] | Annotated[ToolChoice, Tag(OBJECT)],
            _told_by(_tool_choice_kind, "a string or an object"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool = True
    reasoning_effort: TemplateWord | None = Field(
        None, description="Told to the chat template, and as enable_thinking, which is false for 'none' and true for all else."
    )
    # Beyond OpenAI's
    continue_final_message: bool = Field(False, description="The answer goes on with the last message, instead of following it.")
    add_generation_prompt: bool | None = Field(None, description="Open the assistant's turn: unless the last message is continued.")
    chat_template_kwargs: Annotated[dict[TemplateVariable, TemplateValue], _at_most(MAX_TEMPLATE_VARIABLES)] = Field(
        {}, description="Variables of the model's chat template, such as enable_thinking."
    )


class ChatRequest(ConversationRequest, GenerationRequest):
    """POST /v1/chat/completions."""

    prompt_field = "messages"
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def completion_scores(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


def _prompt_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return TEXT
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    return TEXTS if isinstance(first, str) else ID_LISTS if isinstance(first, list) else IDS


TokenIds = Annotated[list[int], Field(fail_fast=True, min_length=1)]


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt_field = "prompt"
    prompt: Annotated[
        Annotated[str, Tag(TEXT)]
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES), Tag(TEXTS)]
        | Annotated[TokenIds, Tag(IDS)]
        | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_CHOICES), Tag(ID_LISTS)],
        _told_by(_prompt_kind, "a string, a list of strings, a list of token ids or a list of lists of them"),
    ]
    max_tokens: int = Field(16, ge=0)
    max_completion_tokens: int | None = Field(None, ge=0, description="Another name of max_tokens.")
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False
    best_of: int | None = Field(None, ge=0, le=20)

    @property
    def length(self) -> int:
        """Tokens of the completion at most."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry a prompt: a flat list of ids is one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def candidates(self) -> int:
        return max(self.n, self.best_of or 0)

    @property
    def completion_scores(self) -> int | None:
        return self.logprobs if self.logprobs is not None or self.candidates == self.n else 0

    @property
    def prompt_scores(self) -> int | None:
        return self.logprobs if self.echo else None


class TokenizeRequest(ModelRequest):
    """POST /tokenize, of a plain prompt."""

    prompt: str
    add_special_tokens: bool = Field(True, description="What the tokenizer puts before a prompt, such as BOS.")
    return_token_strs: bool = False


class TokenizeChatRequest(ConversationRequest, ModelRequest):
    """POST /tokenize, of a conversation."""

    prompt_field = "messages"
    return_token_strs: bool = False


class DetokenizeRequest(ModelRequest):
    """POST /detokenize."""

    tokens: Annotated[list[int], Field(fail_fast=True)]
