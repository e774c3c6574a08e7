"""Program: generates with vLLM until it is killed; says the engine's process and the address of the weights."""

import sys
import threading
import time

from test_vllm_engine import make, requests
from vllm_models import plain_model, write_vllm_folder

from fastrl.rollout.engine import SamplingParams

if __name__ == "__main__":
    folder = write_vllm_folder(sys.argv[1], "llama", tied=True)
    engine = make(folder, plain_model(folder), "rollout.max_response_tokens=170", *sys.argv[2:])
    engine.update_weights(engine.model, 1)

    def generate() -> None:
        while True:
            list(engine.generate(requests(0.7, num_samples=8), SamplingParams(max_tokens=170, ignore_eos=True)))

    threading.Thread(target=generate, daemon=True).start()
    while not engine.health().num_running:
        time.sleep(0.01)
    print("RUNNING", engine.link.process.pid, engine.link.sender.address()["address"], flush=True)
    time.sleep(120)
