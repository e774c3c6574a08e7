"""What can only be known once model and data are both there: whether they go together."""

from __future__ import annotations

from transformers import PreTrainedModel

from fastrl.config.schema import Config
from fastrl.data.prompts import PromptSet
from fastrl.errors import ConfigError


def check_fits(config: Config, model: PreTrainedModel, train: PromptSet, validation: PromptSet | None) -> None:
    """Every prompt leaves room for its response in the model's context, and stop ids are in its vocabulary.

    Raises:
        ConfigError: names the longest prompt and the keys to change.
    """
    text = model.config.get_text_config()
    context, limit = getattr(text, "max_position_embeddings", None), config.rollout.max_response_tokens
    for key, prompts in (("data.train", train), ("data.validation", validation or ())):
        longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
        if context is not None and longest + limit - 1 > context:  # the last token is not fed
            raise ConfigError(
                f"{key}: a prompt of {longest} tokens and a response of up to {limit} exceed the model's context of "
                f"{context} tokens: lower rollout.max_response_tokens, or set data.max_prompt_tokens to "
                f"{max(context - limit + 1, 1)} or less"
            )
    outside = [token for token in config.rollout.stop_token_ids if token >= text.vocab_size]
    if outside:
        raise ConfigError(
            f"rollout.stop_token_ids has {outside[0]}, but the model's ids are below {text.vocab_size}: "
            "no response would ever end with it"
        )
