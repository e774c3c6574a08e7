"""Program: two ranks generate with vLLM, with an engine each (1) or one engine over both (2); one process is killed."""

import os
import signal
import subprocess
import sys

import torch.distributed as torch_dist
from test_vllm_engine import check_samples, make, names, requests
from vllm_models import move, plain_model, write_vllm_folder

from fastrl.rollout.engine import SamplingParams


def body(folder: str, rank: int, size: str) -> None:
    torch_dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = plain_model(f"{folder}/model")
    engine = make(f"{folder}/model", model, f"rollout.tensor_parallel_size={size}")
    params, mine = SamplingParams(max_tokens=24), slice(0, 2) if rank == 0 else slice(2, 3)
    for version in range(2):
        if version:
            move(model, seed=version)
            engine.update_weights(model, version)
        for temperature in (0.0, 0.7):
            asked = requests(temperature, version)[mine]
            samples = list(engine.generate(asked, params))
            assert len(samples) == 3 * len(asked)
            check_samples(samples, model, temperature, version)
    wanted = names(samples)
    iterator = engine.generate(requests(0.7, 1)[mine], params)
    if rank == 0:
        os.kill(engine.link.process.pid, signal.SIGKILL)
    assert names(iterator) == wanted
    assert engine.restarts == (1 if rank == 0 or size == "2" else 0)
    engine.close()
    torch_dist.barrier()
    torch_dist.destroy_process_group()


if __name__ == "__main__":
    folder, size = sys.argv[1:3]
    if len(sys.argv) > 3:
        body(folder, int(sys.argv[3]), size)
        sys.exit(0)
    write_vllm_folder(f"{folder}/model", "llama", tied=True)
    ranks = [subprocess.Popen([sys.executable, *sys.argv, str(rank)]) for rank in range(2)]
    codes = [rank.wait() for rank in ranks]
    assert codes == [0, 0], codes
    print("two ranks: fine")
