"""Make `fastrl/assets/tiny`: a character-level Llama of about a million parameters, seeded, on one CPU thread.

    python scripts/make_tiny.py [--out fastrl/assets/tiny] [--steps 1000] [--seed 0]

It is supervised on the training split of `task:arithmetic` with two kinds of answers: most give the bare result, the
others work it out first. Training stops early, while both still fail often. What is left for reinforcement learning
is to find out that working it out pays, and to get the sums right.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fastrl.data.arithmetic import ArithmeticOptions, Problem, arithmetic_problem
from fastrl.rewards.answers import last_number, same_answer

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
MAX_RESPONSE_TOKENS = 20
FIRST_INDEX = 1_000_000  # far from the problems that training runs see first


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character of printable ASCII and the newline; prompts start with <bos>."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL + CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=160,
        intermediate_size=448,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=5,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        **ids,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, **ids)
    return model


def response_to(problem: Problem, generator: random.Random, worked_fraction: float) -> str:
    """`9`, or with probability `worked_fraction` the steps, e.g. `7+8=15 15-6=9`."""
    if generator.random() < worked_fraction:
        return " ".join(f"{left}{operation}{right}={result}" for left, operation, right, result in problem.steps)
    return str(problem.answer)


def supervised_batch(tokenizer, options, generator, index: int, size: int, worked_fraction: float):
    """Input ids and labels [size, W] of the problems from `index` on; only the responses are learnt."""
    rows = []
    for i in range(index, index + size):
        text, problem = arithmetic_problem(options, False, i)
        prompt = tokenizer.encode(text)
        answer = tokenizer.encode(response_to(problem, generator, worked_fraction), add_special_tokens=False)
        rows.append((prompt, [*answer, tokenizer.eos_token_id]))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    inputs = torch.full((size, width), tokenizer.pad_token_id)
    labels = torch.full((size, width), -100)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        inputs[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return inputs, labels


@torch.no_grad()
def accuracy(model, tokenizer, options, *, num_samples: int, temperature: float, num_problems: int = 256) -> dict:
    """Mean accuracy, pass@num_samples and share of worked answers on held-out problems."""
    tokenizer.padding_side = "left"
    correct, worked = [], []
    for start in range(0, num_problems, 64):
        problems = [arithmetic_problem(options, True, i) for i in range(start, start + 64)]
        inputs = tokenizer([text for text, _ in problems], return_tensors="pt", padding=True)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        out = model.generate(
            input_ids=inputs["input_ids"].repeat_interleave(num_samples, 0),
            attention_mask=inputs["attention_mask"].repeat_interleave(num_samples, 0),
            max_new_tokens=MAX_RESPONSE_TOKENS,
            **sampling,
        )
        texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        answers = [str(problem.answer) for _, problem in problems for _ in range(num_samples)]
        correct += [same_answer(last_number(text), answer) for text, answer in zip(texts, answers)]
        worked += ["=" in text for text in texts]
    table = torch.tensor(correct, dtype=torch.float64).view(-1, num_samples)
    return {
        "accuracy": round(table.mean().item(), 3),
        f"pass@{num_samples}": round(table.amax(1).mean().item(), 3),
        "worked": round(sum(worked) / len(worked), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "fastrl/assets/tiny")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--worked-fraction", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    generator = random.Random(arguments.seed)
    options = ArithmeticOptions()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.98), weight_decay=0.01)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(tokenizer)} tokens")
    model.train()
    for step in range(arguments.steps):
        rate = min(1.0, (step + 1) / 50) * (1 - 0.9 * step / arguments.steps)
        optimizer.param_groups[0]["lr"] = arguments.lr * rate
        index = FIRST_INDEX + step * arguments.batch
        inputs, labels = supervised_batch(
            tokenizer, options, generator, index, arguments.batch, arguments.worked_fraction
        )
        loss = model(input_ids=inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1} loss {loss.item():.3f} cpu {time.thread_time():.0f} s", flush=True)
    model.eval()
    print("held out, greedy:", accuracy(model, tokenizer, options, num_samples=1, temperature=0.0))
    print("held out, T = 1: ", accuracy(model, tokenizer, options, num_samples=8, temperature=1.0))
    tokenizer.padding_side = "right"
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    print(f"saved in {arguments.out}")


if __name__ == "__main__":
    main()
