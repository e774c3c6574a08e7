"""Make `fastrl/assets/tiny`: a character-level Llama of about a million parameters, seeded, on one CPU thread.

    python scripts/make_tiny.py [--out fastrl/assets/tiny] [--steps 600] [--seed 0]

It is supervised on the training split of `task:arithmetic` with two kinds of answers: some work the result out step by
step, some state it at once. Worked answers are what it learns from most of the time; in the last part of training most
answers are bare, so that in the end it usually blurts out a result, often a wrong one. Training stops while both kinds
still fail. What is left for reinforcement learning is to find out that working it out pays, and to get the sums right.
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
PAD, BOS, EOS = 0, 1, 2
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
MAX_RESPONSE_TOKENS = 20
BLOCK = 5  # batches drawn and sorted together
LEARNING_WORKED_FRACTION = 0.9
FIRST_INDEX = 1_000_000  # far from the problems that training runs see first


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character of printable ASCII and the newline; prompts start with <bos>."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL + CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
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


def supervised_batches(tokenizer, options, generator, index: int, size: int, worked_fraction: float):
    """BLOCK batches of input ids and labels [size, W] of the problems from `index` on; only the responses are learnt.

    Rows of similar length share a batch: with stories and digits mixed, a third less padding.
    """
    rows = []
    for i in range(index, index + size * BLOCK):
        text, problem = arithmetic_problem(options, False, i)
        answer = response_to(problem, generator, worked_fraction)
        rows.append((tokenizer.encode(text), [*tokenizer.encode(answer, add_special_tokens=False), EOS]))
    rows.sort(key=lambda row: len(row[0]) + len(row[1]))
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    generator.shuffle(batches)
    for batch in batches:
        width = max(len(prompt) + len(answer) for prompt, answer in batch)
        inputs = torch.full((size, width), PAD)
        labels = torch.full((size, width), -100)
        for row, (prompt, answer) in enumerate(batch):
            end = len(prompt) + len(answer)
            inputs[row, :end] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : end] = torch.tensor(answer)
        yield inputs, labels


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
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--worked-fraction", type=float, default=0.3, help="of the answers in the last part")
    parser.add_argument("--last-part", type=float, default=0.15, help="fraction of the steps")
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
    for block in range(arguments.steps // BLOCK):
        is_last_part = block * BLOCK >= (1 - arguments.last_part) * arguments.steps
        worked = arguments.worked_fraction if is_last_part else LEARNING_WORKED_FRACTION
        index = FIRST_INDEX + block * BLOCK * arguments.batch
        batches = supervised_batches(tokenizer, options, generator, index, arguments.batch, worked)
        for step, (inputs, labels) in enumerate(batches, start=block * BLOCK):
            rate = min(1.0, (step + 1) / 50) * (1 - 0.9 * step / arguments.steps)
            optimizer.param_groups[0]["lr"] = arguments.lr * rate
            loss = model(input_ids=inputs, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if (block + 1) % 10 == 0:
            print(f"step {step + 1} loss {loss.item():.3f} cpu {time.thread_time():.0f} s", flush=True)
    model.eval()
    print("held out, greedy:", accuracy(model, tokenizer, options, num_samples=1, temperature=0.0))
    print("held out, T = 1: ", accuracy(model, tokenizer, options, num_samples=8, temperature=1.0))
    tokenizer.padding_side = "right"
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    for file in arguments.out.iterdir():
        file.chmod(0o644)  # safetensors writes files that only their owner may read
    print(f"saved in {arguments.out}")


if __name__ == "__main__":
    main()
