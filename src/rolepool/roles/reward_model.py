"""The reward model: a Hugging Face sequence classifier that scores prompt and response as one text.

A second reward model is a subclass with another `role` (docs/extending.md).
"""

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rolepool.config import Config
from rolepool.config.model_keys import RewardModelConfig
from rolepool.data.reward_texts import reward_texts
from rolepool.models.loading import load_reward_model
from rolepool.models.packing import TokenRows
from rolepool.models.training import FrozenModel
from rolepool.placement import Role
from rolepool.placement.roles import ROLE_SPECS, longest_row
from rolepool.protocol import DataProto, Dispatch, register
from rolepool.protocol.batches import ScoredChats, ScoredTokens, Scores, Tokens
from rolepool.protocol.columns import Ragged, ragged, ragged_parts
from rolepool.roles.model_role import ModelRole
from rolepool.roles.setups import RewardModelSetup


def _columns_to_score(
    role: type["RewardModel"],
    config: Config,
    setup: RewardModelSetup,
) -> tuple[str, ...]:
    """Prompts are read only if texts may have to be written again in other tokens."""
    model_keys = config.at(ROLE_SPECS[role.role].model)
    if model_keys.input_tokenizer is not None:
        return ScoredChats.names()
    return ScoredTokens.names()


class RewardModel(ModelRole):
    role = Role.RewardModel
    setup_type = RewardModelSetup
    keys: RewardModelConfig

    def __init__(self, config: Config, setup: RewardModelSetup) -> None:
        super().__init__(config, setup)
        section = self.spec.model
        model: Any = load_reward_model(config, section, self.frozen_dtype)
        vocab_size = model.config.get_text_config().vocab_size
        self.texts = reward_texts(config, section, vocab_size)
        # Another vocabulary may not have the policy's pad token. The score does not depend on it.
        self.pad_token_id = setup.pad_token_id if self.texts is None else 0
        model.config.pad_token_id = self.pad_token_id
        self.of_all_tokens: Tensor | None = None
        """The scores at all tokens of the last micro-batch; None if the model's head gets only one
        of them."""
        if hasattr(model, "score"):  # the head of all decoders
            model.score.register_forward_hook(self._keep_logits)
        self.placed = FrozenModel(
            model,
            device=self.device,
            dims=self.context.dims,
            offload=False,
        )

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, reads=_columns_to_score)
    def compute_scores(self, data: DataProto) -> DataProto:
        """The score of each whole response: that of the environment, if it gave one, or else the
        model's."""
        rollouts = ScoredTokens.of(data)
        input_ids = rollouts.input_ids
        limit = self.keys.max_length
        if self.texts is not None:
            texts = self.texts.tokenize(ScoredChats.of(data))
            token_ids = list(chain(*texts))
            lengths = [len(text) for text in texts]
            input_ids = ragged(torch.tensor(token_ids), torch.tensor(lengths))
            limit = longest_row(self.config, self.role)
        if limit is not None:
            input_ids = last_tokens(input_ids, limit)

        def score(rows: TokenRows) -> Scores:
            inputs, _ = rows.padded_inputs(self.pad_token_id)  # on the right
            outputs = self.placed.model(**inputs, use_cache=False)
            logits: Tensor = outputs.logits
            if self.of_all_tokens is not None:
                # The model itself would score before the last token if the policy has written a
                # pad token there.
                num_tokens = inputs["attention_mask"].sum(dim=1)
                row_numbers = torch.arange(len(num_tokens))
                logits = self.of_all_tokens[row_numbers, num_tokens - 1]
            scores_of_rows = logits[:, 0]
            return Scores(scores=scores_of_rows.float())

        tokens = Tokens(
            input_ids=input_ids,
            num_prompt_tokens=rollouts.num_prompt_tokens,
        )
        computed = self.in_micro_batches("compute_scores", tokens, score)
        scores = computed.scores
        of_environment = rollouts.environment_score
        if of_environment is not None:
            scores = torch.where(of_environment.isnan(), scores, of_environment)
        return Scores(scores=scores).to_proto()

    def _keep_logits(
        self,
        head: nn.Module,
        inputs: object,
        logits: Tensor,
    ) -> None:
        self.of_all_tokens = logits


def last_tokens(column: Tensor, limit: int) -> Ragged:
    """A ragged column with only the last `limit` tokens of each row."""
    values, offsets = ragged_parts(column)
    lengths = offsets.diff()
    rows = torch.split(values, lengths.tolist())
    ends = [row[-limit:] for row in rows]
    return ragged(torch.cat(ends), lengths.clamp(max=limit))
