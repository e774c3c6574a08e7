"""A checkpoint becomes a Hugging Face folder with the trained weights, and can be evaluated."""

import torch
from tiny_folder import short_run, write_tiny_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastrl.config.load import load_config
from fastrl.dist.checkpoint import load_checkpoint
from fastrl.run import run_evaluation, run_training
from fastrl.trainer.export import export_run


def test_exported_weights_are_those_of_the_checkpoint(tmp_path):
    model = write_tiny_folder(tmp_path / "tiny")
    held_out = ["data.validation=task:arithmetic", "run.validation_max_prompts=8"]
    loaded = load_config([], short_run(model, tmp_path, "optim.total_steps=2", *held_out))
    run = run_training(loaded)
    folder = export_run(run, tmp_path / "exported")
    saved = load_checkpoint(run)[0]["policy"]["model"]
    exported = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    start = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    assert any(not torch.equal(exported[name], start[name]) for name in saved)
    assert AutoTokenizer.from_pretrained(folder)("12").input_ids == AutoTokenizer.from_pretrained(model)("12").input_ids
    assert run_evaluation(loaded, checkpoint=run)["val/prompts"] == 8
