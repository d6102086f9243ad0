"""The exception hierarchy. Every error that a user can cause names the thing at fault and the remedy."""

from __future__ import annotations


class Qwen35Error(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(Qwen35Error):
    """A flag, argument or environment variable has a value that cannot be used."""


class ModelFileError(Qwen35Error):
    """A model file is missing, damaged, truncated or inconsistent."""


class UnsupportedModel(ModelFileError):
    """The file is sound but holds a model that this package does not run."""


class BackendError(Qwen35Error):
    """A backend failed while it was opened or while it ran."""


class BackendUnavailable(BackendError):
    """The asked-for device or instruction level does not exist on this machine."""


class KernelCompileError(BackendError):
    """A device kernel could not be compiled."""


class OutOfMemory(BackendError):
    """Memory for weights, state or pages could not be had."""


class RequestError(Qwen35Error):
    """One request is at fault; nothing else is affected.

    ``param`` names the field (None where no single field is at fault).
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(RequestError):
    """The prompt is as long as the context or longer; it was refused whole, not truncated."""

    def __init__(self, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(
            f"the prompt has {n_prompt_tokens} tokens and the context holds {n_ctx}; "
            "it was refused whole and not truncated. Shorten it or raise --ctx-size",
            "prompt",
        )
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx


class TemplateError(RequestError):
    """The model's chat template refused the conversation, failed, or ran over its work limit."""


class GenerationFailed(RequestError):
    """A turn produced values that are not finite; it was ended and its state dropped."""


class QueueFull(Qwen35Error):
    """The bounded queue has no place left."""


class Cancelled(Qwen35Error):
    """The caller withdrew the request."""


class EngineStopped(Qwen35Error):
    """The engine is not running any more."""


class EngineLoading(EngineStopped):
    """The engine does not run yet: its model is being made ready."""


class EngineRestarting(EngineStopped):
    """The engine failed and starts anew; the turns that ran are lost, later ones are welcome."""
