"""Program: vLLM in this process follows updates and leaves generators, environment and threads as they were."""

import os
import sys

import torch
from test_vllm_engine import follow_updates, make
from vllm_models import plain_model, write_vllm_folder

if __name__ == "__main__":
    folder = write_vllm_folder(sys.argv[1], "llama", tied=True)
    model = plain_model(folder)
    torch.manual_seed(5)
    state, environment = torch.get_rng_state(), dict(os.environ)
    engine = make(folder, model, "rollout.vllm_in_process=true", *sys.argv[2:])
    engine.ready()
    assert torch.equal(torch.get_rng_state(), state)
    assert dict(os.environ) == environment
    torch.set_num_threads(3)
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)
    follow_updates(engine, model, steps=3)
    engine.close()
    print("in process: fine")
