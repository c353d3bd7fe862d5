"""What a reward model reads: the policy's tokens, or the same texts in tokens of its own.

Does not know the reward model, only its folder with the tokenizer.
"""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rolepool.config import Config
from rolepool.data.prompts import PromptSet
from rolepool.data.tokenizer import render_chat, tokenize, tokenizer_at
from rolepool.errors import ConfigError
from rolepool.protocol.batches import ScoredChats


class RewardTexts:
    """Writes prompts and responses in the tokens of a reward model that does not have the policy's
    tokenizer."""

    def __init__(self, policy: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase) -> None:
        """`own` is the tokenizer of the reward model."""
        self._policy = policy
        self._own = own

    def check(self, prompts: PromptSet) -> None:
        """Raise BadRow if the reward model's template cannot write the first chat."""
        columns = prompts.take([0])
        prompt = columns["raw_prompt"][0]
        origin = columns["origin"][0]
        render_chat(self._own, prompt, origin, "")

    def tokenize(self, batch: ScoredChats) -> list[list[int]]:
        """The tokens of each row. A chat is written with the reward model's template, the response
        as its last message. If the prompt is a plain string, the text is what the policy read and
        wrote."""
        rows: list[dict[str, object]] = []
        for prompt, origin, whole, response in zip(
            batch.raw_prompt,
            batch.origin,
            batch.input_ids.unbind(),
            batch.responses(),
            strict=True,
        ):
            is_chat = not isinstance(prompt, str)
            if is_chat:
                answer = str(self._policy.decode(response, skip_special_tokens=True))
                text = render_chat(self._own, prompt, origin, answer)
            else:
                text = str(self._policy.decode(whole, skip_special_tokens=True))
            rows.append({"is_chat": is_chat, "text": text})
        return list(tokenize(self._own, rows))


def reward_texts(config: Config, section: str, vocab_size: int) -> RewardTexts | None:
    """How texts are tokenized again for the reward model of a section, such as
    `reward_model.model`; None if it gets the policy's tokens. Raises ConfigError if it has too few
    tokens for that."""
    keys = config.at(section)
    policy_keys = config.actor_rollout_ref.model
    name = f"{section}.input_tokenizer"
    path = keys.input_tokenizer
    if path in (None, policy_keys.path):
        path = policy_keys.tokenizer
    policy = tokenizer_at(name, path, policy_keys.trust_remote_code)
    folder = Path(keys.path).expanduser()
    tokenizer_files = [*folder.glob("tokenizer*"), *folder.glob("vocab*")]
    # A name that is not a folder is one of the hub, where a model has its tokenizer.
    has_tokenizer = not folder.is_dir() or len(tokenizer_files) > 0
    if has_tokenizer and keys.input_tokenizer is not None:
        own = tokenizer_at(f"{section}.path", keys.path, keys.trust_remote_code)
        has_same_template = own.chat_template in (None, policy.chat_template)
        has_same_tokens = own.get_vocab() == policy.get_vocab()
        if not has_same_tokens or not has_same_template:
            return RewardTexts(policy, own)
    if vocab_size < len(policy):
        fewer = f"it has {vocab_size} tokens, fewer than the policy ({len(policy)})"
        what = f"{fewer}, whose tokens it would get"
        if has_tokenizer:
            fix = f"do not set {name}=null"
        else:
            fix = "add its tokenizer to its folder"
        raise ConfigError(f"{section}.path={keys.path}: {what}; {fix}")
    return None
