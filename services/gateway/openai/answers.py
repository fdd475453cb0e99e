"""What clients get, as schemas of the OpenAPI document; answers are written by hand, and tests compare them with these."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
FinishReason = Literal["stop", "length", "tool_calls"]


class Answer(BaseModel):
    """The base of everything in an answer."""

    model_config = ConfigDict(extra="forbid")


class Fault(Answer):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None = Field(description="The field at fault.")
    code: str | None = Field(description="OpenAI's name of the fault.")


class ErrorAnswer(Answer):
    """Every error, of every route."""

    error: Fault


class PromptDetails(Answer):
    cached_tokens: Count


class CompletionDetails(Answer):
    reasoning_tokens: Count


class Usage(Answer):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TokenLogprob(Answer):
    token: str
    logprob: Annotated[float, Field(le=0)]
    bytes: list[Annotated[int, Field(ge=0, le=255)]] | None


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    content: list[ChosenLogprob]
    refusal: None


class CalledFunction(Answer):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it.")


class MadeToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[MadeToolCall] | None = None


class ChatChoice(Answer):
    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class Head(Answer):
    id: str
    created: int = Field(description="Unix time in seconds.")
    model: str
    system_fingerprint: str


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(Answer):
    name: str | None = None
    arguments: str


class ToolCallDelta(Answer):
    index: Count
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Answer):
    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(Head):
    """One event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class LegacyLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[Annotated[float, Field(le=0)] | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class CompletionChoice(Answer):
    index: Count
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(Answer):
    index: Count
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionChunk(Head):
    """One event of a streamed legacy completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = Field(description="Tokens of prompt and completion together; null before it is known.")


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(Answer):
    count: Count
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    prompt: str


class TokenizerInfo(Answer):
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    vocab_size: int
    eos_token_ids: list[int]
    max_model_len: int


class RenderedChat(Answer):
    model: str
    prompt: str
    tokens: list[int]
    count: Count


class Health(Answer):
    status: Literal["ok"]


class Version(Answer):
    version: str


class Status(BaseModel):
    """How the deployment stands, for the page at /."""

    model_config = ConfigDict(extra="allow")
