"""What a reward model reads: the policy's tokens, or the same texts in tokens of its own.

Owns when texts are tokenized again, and how a prompt and its response become one text for that.
"""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rolepool.config import Config
from rolepool.data.prompts import PromptSet, load_tokenizer, render_chat, tokenize
from rolepool.errors import ConfigError
from rolepool.protocol import DataProto
from rolepool.protocol.ragged import INPUT_IDS, TOKENS, rows_of_responses

READS = (*TOKENS, "raw_prompt", "origin")
"""The columns that `RewardTexts.tokenize` reads."""


class RewardTexts:
    """Writes prompts and responses in the tokens of a reward model that does not have the policy's tokenizer."""

    def __init__(self, policy: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase) -> None:
        self._policy, self._own = policy, own

    def check(self, prompts: PromptSet) -> None:
        """Raise BadRow if the reward model's template cannot write the first chat."""
        prompt, origin = (prompts.take([0])[name][0] for name in ("raw_prompt", "origin"))
        if not isinstance(prompt, str):
            render_chat(self._own, prompt, origin, answer="")

    def tokenize(self, batch: DataProto) -> list[list[int]]:
        """The tokens of each row. A chat is written with the reward model's template, the response as its last message.
        If the prompt is a plain string, the text is what the policy read and wrote."""
        columns = batch.non_tensor_batch
        rows = []
        token_rows = zip(batch.batch[INPUT_IDS].unbind(), rows_of_responses(batch.batch), strict=True)
        for prompt, origin, (ids, response) in zip(columns["raw_prompt"], columns["origin"], token_rows, strict=True):
            is_chat = not isinstance(prompt, str)
            text = str(self._policy.decode(response if is_chat else ids, skip_special_tokens=True))
            text = render_chat(self._own, prompt, origin, answer=text) if is_chat else text
            rows.append({"is_chat": is_chat, "text": text})
        return list(tokenize(self._own, rows))


def reward_texts(config: Config, section: str, vocab_size: int) -> RewardTexts | None:
    """How texts are tokenized again for the reward model of a section, such as `reward_model.model`; None if it gets
    the policy's tokens. Raises ConfigError if it has too few tokens for that."""
    keys, policy_keys = config.at(section), config.actor_rollout_ref.model
    name, path = f"{section}.input_tokenizer", keys.input_tokenizer or policy_keys.path
    policy = load_tokenizer(path, trust_remote_code=policy_keys.trust_remote_code, name=name)
    folder = Path(keys.path).expanduser()
    has_tokenizer = not folder.is_dir() or any([*folder.glob("tokenizer*"), *folder.glob("vocab*")])
    if has_tokenizer and keys.input_tokenizer is not None:
        own = load_tokenizer(keys.path, trust_remote_code=keys.trust_remote_code, name=f"{section}.path")
        if own.get_vocab() != policy.get_vocab() or own.chat_template not in (None, policy.chat_template):
            return RewardTexts(policy, own)
    if vocab_size < len(policy):
        what = f"it has {vocab_size} tokens, fewer than the policy ({len(policy)}), whose tokens it would get"
        fix = f"do not set {name}=null" if has_tokenizer else "add its tokenizer to its folder"
        raise ConfigError(f"{section}.path={keys.path}: {what}; {fix}")
    return None
