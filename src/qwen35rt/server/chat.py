"""POST /v1/chat/completions and its two relatives: the request's type, its prompt, its plan, its job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ..config import SAMPLING_LIMITS
from ..errors import RequestError
from ..tokenizer import read_chat_template
from .answer import Job
from .body import Body, Fields, neutral, read_body
from .chat_answer import AnswerForm, ChatWriter, chat_usage
from .errors import EmptyPrompt, NoChatTemplate, UnsupportedParameter
from .fields import INERT, LATER, SECOND, SamplingRequest, check_common, named_as_sent
from .messages import ChatMessage, Conversation, read_messages
from .model import Loaded
from .plans import AnswerKind, Planner, check_length, tokenizing
from .prompt import ChatPrompt, ChatRenderer, RenderOptions
from .reasoning import Effort, Thinking, banned_ids, chat_defaults, markup_of, template_variables
from .record import Record
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


_KIND = AnswerKind("chatcmpl-", "chat.completion", "chat.completion.chunk", usage_last=True, usage=chat_usage)


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
    check_common(request, body.names, settings.sampling_limits)
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
    with tokenizing():
        return renderer.prompt(chat.conversation, options, check)


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
    # The engine calls messages a prompt.
    with named_as_sent({**chat.body.names, "prompt": "messages"}):
        return _build(chat, model, settings, record)


def _build(chat: ChatBody, model: Loaded, settings: ServerSettings, record: Record) -> Job:
    request, facts, tools = chat.body.value, model.facts, chat.tools
    prompt = render(chat, model, settings, lambda text: check_length(model.fewest_tokens(text), facts.n_ctx))
    if not prompt.ids:
        raise EmptyPrompt("the chat template wrote an empty prompt", "messages")
    preset = settings.sampling_preset or facts.preset
    flags, file = chat_defaults(preset, prompt.reasoning, settings.sampling, facts.metadata)
    limit = -1 if settings.max_tokens_default is None else settings.max_tokens_default
    planner = Planner.of(request, facts, flags, file, limit, settings.sampling_limits)
    plan = planner.plan(
        prompt.ids,
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
    return planner.job(_KIND, record, [plan], [ChatWriter(0, form)])
