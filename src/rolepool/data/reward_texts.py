"""What a reward model reads: the policy's tokens, or the same texts in tokens of its own.

Owns when texts are tokenized again, and how a prompt and its response become one text for that.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rolepool.config import Config
from rolepool.data.prompts import PromptSet, load_tokenizer, read_tokenizer, render_chat, tokenize
from rolepool.errors import ConfigError, DataError
from rolepool.protocol import DataProto
from rolepool.protocol.ragged import INPUT_IDS, TOKENS, rows_of_responses

READS = (*TOKENS, "raw_prompt", "origin")
"""The columns that `RewardTexts.tokenize` reads."""


class RewardTexts:
    """Writes prompts and responses in the tokens of a reward model that does not have the policy's tokenizer."""

    def __init__(self, policy: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase) -> None:
        self._policy, self.tokenizer = policy, own

    def check(self, prompts: PromptSet) -> None:
        """Raise BadRow if the reward model's template cannot write the first chat."""
        first = prompts.take([0])
        (prompt,), (origin,) = first["raw_prompt"], first["origin"]
        if not isinstance(prompt, str):
            render_chat(self.tokenizer, prompt, origin, answer="")

    def tokenize(self, batch: DataProto) -> list[list[int]]:
        """The tokens of each row. A chat is written with the reward model's template, the response as its last message.
        If the prompt is a plain string, the text is what the policy read and wrote."""
        columns = batch.non_tensor_batch
        if missing := [name for name in READS if name not in TOKENS and name not in columns]:
            where = "call compute_scores with rollouts.union(prompts), and name these columns in its `reads`"
            raise DataError(f"the batch has no {' and no '.join(missing)}, which the reward model needs; {where}")
        rows = []
        token_rows = zip(batch.batch[INPUT_IDS].unbind(), rows_of_responses(batch.batch), strict=True)
        for prompt, origin, (ids, response) in zip(columns["raw_prompt"], columns["origin"], token_rows, strict=True):
            is_chat = not isinstance(prompt, str)
            text = str(self._policy.decode(response if is_chat else ids, skip_special_tokens=True))
            text = render_chat(self.tokenizer, prompt, origin, answer=text) if is_chat else text
            rows.append({"is_chat": is_chat, "text": text})
        return list(tokenize(self.tokenizer, rows))


def reward_texts(config: Config, section: str, vocab_size: int) -> RewardTexts | None:
    """How the reward model of a section, such as `reward_model.model`, gets its tokens; None: from the policy.

    Raises ConfigError if it has too few tokens for that.
    """
    keys, policy_keys = config.at(section), config.actor_rollout_ref.model
    policy = load_tokenizer(policy_keys.path, trust_remote_code=policy_keys.trust_remote_code)
    key, path = f"{section}.path={keys.path}", Path(keys.path).expanduser()
    if keys.input_tokenizer not in (None, policy_keys.path):
        setting = f"{section}.input_tokenizer={keys.input_tokenizer}"
        given = read_tokenizer(setting, keys.input_tokenizer, trust_remote_code=keys.trust_remote_code)
        if given.get_vocab() != policy.get_vocab():
            raise ConfigError(f"{setting}: it must be the tokenizer of the policy, which it decodes; remove the key")
    has_tokenizer = not path.is_dir() or any([*path.glob("tokenizer*"), *path.glob("vocab*")])
    if has_tokenizer and keys.input_tokenizer is not None:
        own = read_tokenizer(key, keys.path, trust_remote_code=keys.trust_remote_code)
        same_tokens = own.get_vocab() == policy.get_vocab()
        if not same_tokens or own.chat_template not in (None, policy.chat_template):
            return RewardTexts(policy, own)
    if vocab_size < len(policy):
        what = f"it has {vocab_size} tokens, fewer than the policy ({len(policy)}), whose tokens it would get"
        fix = f"do not set {section}.input_tokenizer=null" if has_tokenizer else "add its tokenizer to its folder"
        raise ConfigError(f"{key}: {what}; {fix}")
    return None
