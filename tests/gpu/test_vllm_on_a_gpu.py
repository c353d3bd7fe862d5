"""What the vllm engine does on a GPU, up to vLLM's own functions. No machine with a GPU and vLLM is
available, so a small substitute (tests/gpu/vllm_substitute) takes vLLM's place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rolepool.rollout.engine import Request, Sampling
from rolepool.rollout.sampling import sample_seed
from rolepool.rollout.transformers_engine import TransformersEngine
from rolepool.rollout.vllm_engine import VllmEngine, start_vllm
from tiny_models import make_model, write_model
from vllm_pythons import substitute_python

pytestmark = pytest.mark.gpu

SAMPLED = Sampling(
    1.0, 1.0, -1, do_sample=True, max_new_tokens=20, ignore_eos=True, stop_token_ids=()
)
REQUESTS = [Request([3 + index, 5, 7], sample_seed(0, index, 0)) for index in range(6)]


@pytest.mark.parametrize("tied", [False, True])
def test_new_weights_reach_the_other_process_as_handles_of_gpu_memory(
    tmp_path: Path, tied: bool
) -> None:
    folder = write_model(tmp_path / "model", "qwen2", tie_word_embeddings=tied)
    arguments = {"model": folder, "dtype": "float32", "enable_sleep_mode": True}
    client = start_vllm(substitute_python(tmp_path), arguments, gpu="cuda")
    engine = VllmEngine(client, make_model("qwen2", tie_word_embeddings=tied), gpu="cuda")
    try:
        for version in (1, 2):
            trained = make_model("qwen2", seed=version, tie_word_embeddings=tied).cuda()
            before = torch.cuda.memory_allocated()
            engine.sleep()
            named = list(trained.named_parameters())
            engine.update_weights(named[:5], None)
            engine.update_weights(named[5:], version)
            assert torch.cuda.memory_allocated() <= before, "the copy of the weights is freed"
            engine.wake()
            expected = TransformersEngine(trained, 64).generate(REQUESTS, SAMPLED)
            for one, other in zip(engine.generate(REQUESTS, SAMPLED), expected, strict=True):
                assert one.token_ids.tolist() == other.token_ids.tolist()
                assert one.weights_version == version
                torch.testing.assert_close(
                    torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=0, atol=1e-4
                )
    finally:
        engine.close()
    assert client.process.returncode == 0
