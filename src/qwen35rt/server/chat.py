"""POST /v1/chat/completions and its two relatives: the request's type, its prompt, its plan, its job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..config import SAMPLING_LIMITS
from ..engine.sampler import fresh_seed
from ..errors import ContextLengthExceeded, RequestError
from ..plan import make_plan, sampling_params
from ..tokenizer import read_chat_template
from .answer import Job
from .body import Body, Fields, neutral, read_body
from .chat_answer import AnswerForm, ChatWriter, chat_usage
from .errors import EmptyPrompt, NoChatTemplate, TokenizerFailed, UnsupportedParameter
from .fields import INERT, LATER, SECOND, SamplingRequest, check_common
from .messages import ChatMessage, Conversation, read_messages
from .model import Loaded
from .prompt import ChatPrompt, ChatRenderer, RenderOptions
from .reasoning import Effort, Thinking, banned_ids, chat_defaults, markup_of, template_variables
from .record import Record, random_letters
from .scan import call_form
from .settings import ServerSettings
from .tools import ToolUse, read_tools
from .unknown import first_places, refuse


class ChatRequest(SamplingRequest, kw_only=True):
    """The body of /v1/chat/completions, /v1/chat/completions/input_tokens and /apply-template."""

    messages: list[ChatMessage] | None = None
    parse_special: bool = False
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None
    thinking_token_budget: int | None = None
    include_reasoning: bool = True
    reasoning_format: Literal["auto", "deepseek", "none"] = "auto"
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


FIELDS = Fields(
    LATER
    | {
        "logprobs": neutral(False),
        "top_logprobs": neutral(0),
        "modalities": neutral(["text"]),
        "audio": neutral(),
        "prediction": neutral(),
        "web_search_options": neutral(),
        "echo": neutral(False),
        "functions": neutral(),
        "function_call": neutral("none", "auto"),
    },
    SECOND
    | {
        "reasoning_budget_tokens": "thinking_token_budget",
        "thinking_budget_tokens": "thinking_token_budget",
    },
    INERT,
)


@dataclass(frozen=True)
class ChatBody:
    """A request that passed every check for which no model is needed. ``resume``: its last message goes on;
    ``add_generation_prompt``: else a new turn begins. ``budget``: of reasoning tokens, -1: none."""

    body: Body[ChatRequest]
    conversation: Conversation
    tools: ToolUse
    variables: dict[str, Any]
    resume: bool
    add_generation_prompt: bool
    budget: int

    @property
    def ignored(self) -> tuple[str, ...]:
        """Paths of fields that have no effect."""
        return first_places([*self.body.ignored, *self.tools.unknown, *self.tools.ignored])


def parse(raw: bytes, settings: ServerSettings) -> ChatBody:
    """Everything that can be checked without a model."""
    body = read_body(raw, ChatRequest, FIELDS, max_depth=settings.max_json_depth, strict=settings.strict_fields)
    request = body.value
    check_common(request, body.names)
    if not request.messages:
        raise RequestError("messages must be a list of at least one message", "messages")
    if len(request.messages) > settings.max_messages:
        raise RequestError(f"messages must be a list of at most {settings.max_messages}", "messages")
    if request.chat_template is not None and not settings.allow_request_template:
        raise UnsupportedParameter("this server takes no chat_template from requests", "chat_template")
    conversation = read_messages(request.messages)
    tools = read_tools(request.tools, request.tool_choice, request.parallel_tool_calls, settings.max_tools)
    if settings.strict_fields:
        refuse(tools.unknown)
    resume, add = _ending(request, conversation)
    return ChatBody(
        body=body,
        conversation=conversation,
        tools=tools,
        variables=template_variables(
            request.chat_template_kwargs,
            request.enable_thinking,
            request.thinking,
            request.reasoning_effort,
            settings.reasoning,
        ),
        resume=resume,
        add_generation_prompt=add,
        budget=_budget(request, body, settings),
    )


def _ending(request: ChatRequest, conversation: Conversation) -> tuple[bool, bool]:
    """Whether the last message goes on, and whether a new turn begins (section 5)."""
    resume, add = request.continue_final_message, request.add_generation_prompt
    if resume and add:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    if conversation.open is None:
        if resume and request.messages and request.messages[-1].role != "assistant":
            raise RequestError("continue_final_message needs a last message of the assistant", "continue_final_message")
        if resume and conversation.messages[-1:] and conversation.messages[-1]["role"] == "assistant":
            raise RequestError(
                "a message with tool calls is complete and cannot be continued", "continue_final_message"
            )
        return False, add is not False
    if resume is None:
        resume = not add
    return resume, not resume and add is not False


def _budget(request: ChatRequest, body: Body[ChatRequest], settings: ServerSettings) -> int:
    name = body.names.get("thinking_token_budget", "thinking_token_budget")
    budget = request.thinking_token_budget
    if budget is None and request.thinking is not None:
        name, budget = "thinking.budget_tokens", request.thinking.budget_tokens
    if budget is None:
        return settings.reasoning_budget
    if not -1 <= budget <= SAMPLING_LIMITS.max_tokens:
        raise RequestError(f"{name} must be an integer from -1 to {SAMPLING_LIMITS.max_tokens}", name)
    return budget


def render(
    chat: ChatBody, model: Loaded, settings: ServerSettings, check: Callable[[str], None] = lambda text: None
) -> ChatPrompt:
    """The prompt of a request. ``check`` is given its text before it is tokenised. Runs off the event loop.

    Raises NoChatTemplate, TemplateError, TokenizerFailed.
    """
    request = chat.body.value
    options = RenderOptions(
        tools=chat.tools.tools,
        variables=chat.variables,
        parse_special=request.parse_special,
        late_system=settings.late_system,
        add_generation_prompt=chat.add_generation_prompt,
        resume=chat.resume,
    )
    renderer = _renderer(request, model)
    try:
        return renderer.prompt(chat.conversation, options, check)
    except RequestError:
        raise
    except Exception as e:
        raise TokenizerFailed(f"the tokenizer failed on the prompt ({type(e).__name__}: {str(e)[:200]})") from e


def _renderer(request: ChatRequest, model: Loaded) -> ChatRenderer:
    if request.chat_template is not None:
        template = read_chat_template({"tokenizer.chat_template": request.chat_template}, model.tokenizer.vocab)
        if template is not None:
            return ChatRenderer(template, model.tokenizer)
    if model.chat is None:
        raise NoChatTemplate("the model has no chat template; /v1/completions takes a prompt without one", "messages")
    return model.chat


def build(chat: ChatBody, model: Loaded, settings: ServerSettings, record: Record) -> Job:
    """Render, tokenise and check against the model: after this nothing is left that could be refused."""
    try:
        return _build(chat, model, settings, record)
    except RequestError as e:
        # The engine calls messages a prompt; a field is named as the client did.
        e.param = "messages" if e.param == "prompt" else chat.body.names.get(e.param or "", e.param)
        raise


def _build(chat: ChatBody, model: Loaded, settings: ServerSettings, record: Record) -> Job:
    request, facts, tools = chat.body.value, model.facts, chat.tools

    def check(text: str) -> None:
        least = model.fewest_tokens(text)
        if least >= facts.n_ctx:
            error = ContextLengthExceeded(least, facts.n_ctx)
            error.args = (str(error).replace(" has ", " has at least ", 1),)
            raise error

    prompt = render(chat, model, settings, check)
    if not prompt.ids:
        raise EmptyPrompt("the chat template wrote an empty prompt", "messages")
    flags, file = chat_defaults(settings.sampling_preset, prompt.reasoning, settings.sampling, facts.metadata)
    params = sampling_params(flags | request.sampling(), file, facts.n_vocab)
    if params.seed is None or params.seed == -1:
        params = replace(params, seed=fresh_seed())
    assert params.seed is not None
    limit = settings.max_tokens_default if request.max_tokens is None else request.max_tokens
    limit = -1 if limit is None else limit
    if 0 <= limit < params.min_tokens:
        raise RequestError("min_tokens is larger than max_tokens", "min_tokens")
    plan = make_plan(
        prompt.ids,
        params,
        facts.n_ctx,
        facts.n_vocab,
        max_tokens=limit,
        include_stop=request.include_stop_str_in_output,
        skip_special=request.skip_special_tokens,
        cache=request.cache_prompt is not False,
        warm=limit == 0 and request.cache_prompt is True,
        keep_at=prompt.keep_at,
        banned=banned_ids(model.tokenizer, tools),
        markup=markup_of(model.tokenizer, prompt, tools, chat.budget, settings.reasoning_budget_message),
    )
    form = AnswerForm(
        reasoning=prompt.reasoning,
        opening=prompt.opening,
        tools=tools.tools,
        calls=tools.calls,
        form=call_form(prompt.source),
        one_call=tools.one_call,
        split=request.reasoning_format != "none",
        reasoning_field=settings.reasoning_field if request.include_reasoning else "none",
        prompt_ids=plan.ids if request.return_token_ids else None,
    )
    return Job(
        id=f"chatcmpl-{random_letters()}",
        object="chat.completion",
        chunk_object="chat.completion.chunk",
        created=record.created,
        model=facts.id if request.model is None else request.model,
        fingerprint=facts.fingerprint,
        seed=params.seed,
        plans=[plan],
        writers=[ChatWriter(0, form)],
        stream=request.stream,
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        usage_last=True,
        timings_per_token=request.timings_per_token,
        usage=chat_usage,
    )
