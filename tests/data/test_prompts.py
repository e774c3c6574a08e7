"""Loading prompts: formats, the two usual layouts, rendering with exactly one BOS, the length filter, errors by key."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

from fastrl.data.prompts import load_prompts
from fastrl.errors import DataError

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
TEMPLATE = (
    "{{ bos_token }}{% if tools %}[{{ tools | length }}]{% endif %}"
    "{% for m in messages %}({{ m['role'][0] }}:{{ m['content'] }}){% endfor %}"
    "{% if add_generation_prompt %}(a:{% endif %}"
)


def make_tokenizer(*, template=None, adds="<s> $A"):
    """One id a character; ids 0..3 are special; `adds` is what the tokenizer puts around a text."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    if adds:
        special = [("<s>", 1), ("</s>", 2)]
        tokenizer.post_processor = processors.TemplateProcessing(single=adds, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=template,
    )


def write_jsonl(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def ids(text):
    return tuple(CHARACTERS.index(c) + 4 for c in text)


PLAIN_ROWS = [{"prompt": "1+1", "answer": "2", "level": 1}, {"prompt": "2+2", "answer": "4", "level": 3}]


def test_plain_layout(tmp_path):
    prompts = load_prompts(write_jsonl(tmp_path / "a.jsonl", PLAIN_ROWS), make_tokenizer())
    assert [p.token_ids for p in prompts] == [(1, *ids("1+1")), (1, *ids("2+2"))]
    assert prompts[1].text == "2+2" and prompts[1].answer == "4" and prompts[1].messages is None
    assert prompts[1].extra == {"level": 3} and prompts[1].prompt_id == 1
    assert prompts[0].data_source.endswith("a.jsonl")


def test_chat_layout_with_reward_model(tmp_path):
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "2+2"}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 5},
        "ability": "math",
    }
    tokenizer = make_tokenizer(template=TEMPLATE)
    (prompt,) = load_prompts(write_jsonl(tmp_path / "a.jsonl", [row]), tokenizer)
    assert prompt.answer == "4" and prompt.data_source == "gsm8k" and prompt.text == "2+2"
    assert prompt.messages == row["prompt"]
    assert prompt.extra["extra_info"] == {"index": 5} and prompt.extra["reward_model"]["style"] == "rule"
    assert prompt.token_ids == (1, *ids("(s:S)(u:2+2)(a:"))


def test_columns_are_mapped(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "1+1", "target": 2, "set": "mine"}])
    (prompt,) = load_prompts(
        path, make_tokenizer(), prompt_column="question", answer_column="target", source_column="set"
    )
    assert (prompt.text, prompt.answer, prompt.data_source) == ("1+1", 2, "mine")


def test_parquet_and_csv_give_the_same(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows = [{"prompt": "a, b", "answer": "1"}, {"prompt": 'say "hi"\nnow', "answer": "2"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text('prompt,answer\n"a, b",1\n"say ""hi""\nnow",2\n', encoding="utf-8")
    tokenizer = make_tokenizer()
    sets = [
        load_prompts(path, tokenizer)
        for path in (write_jsonl(tmp_path / "a.jsonl", rows), str(tmp_path / "a.parquet"), str(tmp_path / "a.csv"))
    ]
    assert len({s.fingerprint for s in sets}) == 1
    assert [p.text for p in sets[1]] == ["a, b", 'say "hi"\nnow']


def test_parquet_chat_messages(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    # parquet gives every message the same keys: the missing ones come back as None
    messages = [{"role": "user", "content": "q", "name": "x"}, {"role": "user", "content": "r", "name": None}]
    table = pyarrow.Table.from_pylist([{"prompt": messages, "answer": "1"}])
    parquet.write_table(table, tmp_path / "a.parquet")
    (prompt,) = load_prompts(str(tmp_path / "a.parquet"), make_tokenizer(template=TEMPLATE))
    assert prompt.messages == [{"role": "user", "content": "q", "name": "x"}, {"role": "user", "content": "r"}]


def test_csv_with_messages_as_json(tmp_path):
    cell = json.dumps([{"role": "user", "content": "q"}]).replace('"', '""')
    (tmp_path / "a.csv").write_text(f'prompt,answer\n"{cell}",1\n')
    (prompt,) = load_prompts(str(tmp_path / "a.csv"), make_tokenizer(template=TEMPLATE))
    assert prompt.token_ids == (1, *ids("(u:q)(a:"))


@pytest.mark.parametrize("adds", ["<s> $A", "<s> $A </s>", "$A", "$A </s>"])
def test_plain_text_keeps_what_comes_before_and_stays_open(adds, tmp_path):
    (prompt,) = load_prompts(
        write_jsonl(tmp_path / "a.jsonl", [{"prompt": "q", "answer": 1}]), make_tokenizer(adds=adds)
    )
    assert prompt.token_ids == ((1,) if adds.startswith("<s>") else ()) + ids("q")


@pytest.mark.parametrize("text", ["q", "<s>q", "<s><s>q"])
def test_one_bos_whoever_writes_it(text, tmp_path):
    tokenizer = make_tokenizer(template=TEMPLATE)
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": text, "answer": 1}])
    (plain,) = load_prompts(path, tokenizer, apply_chat_template=False)
    assert plain.token_ids == (1, *ids("q"))
    (chat,) = load_prompts(write_jsonl(tmp_path / "b.jsonl", [{"prompt": "q", "answer": 1}]), tokenizer)
    assert chat.token_ids.count(1) == 1 and chat.token_ids[0] == 1


def test_template_and_system_prompt(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "{x}+1", "answer": 1}])
    wrap = {"system_prompt": "Be brief.", "prompt_template": "Q {prompt} {y}"}
    (chat,) = load_prompts(path, make_tokenizer(template=TEMPLATE), **wrap)
    assert chat.token_ids == (1, *ids("(s:Be brief.)(u:Q {x}+1 {y})(a:"))
    (plain,) = load_prompts(path, make_tokenizer(), **wrap)
    assert plain.token_ids == (1, *ids("Be brief.\n\nQ {x}+1 {y}"))
    own = [{"role": "system", "content": "Own."}, {"role": "user", "content": "q"}]
    (kept,) = load_prompts(
        write_jsonl(tmp_path / "b.jsonl", [{"prompt": own, "answer": 1}]), make_tokenizer(template=TEMPLATE), **wrap
    )
    assert kept.token_ids == (1, *ids("(s:Own.)(u:q)(a:"))


def test_a_started_answer_is_continued(tmp_path):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": messages, "answer": 1}])
    (prompt,) = load_prompts(path, make_tokenizer(template=TEMPLATE))
    assert prompt.token_ids == (1, *ids("(u:q)(a:The answer"))


def test_length_is_counted_on_the_rendered_prompt(tmp_path):
    # rendered: BOS + "(u:" + text + ")" + "(a:" = text + 8; tools add "[n]"
    rows = [
        {"prompt": "x" * 12, "answer": 1},
        {"prompt": "x" * 12, "answer": 1, "tools": [{"name": "calculator"}]},
        {"prompt": "x" * 13, "answer": 1},
        {"prompt": "y" * 12, "answer": 1},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    prompts = load_prompts(path, make_tokenizer(template=TEMPLATE), max_prompt_tokens=20)
    assert [p.prompt_id for p in prompts] == [0, 3] and prompts.num_dropped == 2
    assert len(prompts[0].token_ids) == 20
    with pytest.raises(DataError, match="all 4 prompts are longer than data"):
        load_prompts(path, make_tokenizer(template=TEMPLATE), max_prompt_tokens=19)


def test_several_sources_and_max_prompts(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", PLAIN_ROWS)
    prompts = load_prompts([first, "task:arithmetic"], make_tokenizer(), options={"size": 3}, max_prompts=4)
    assert [p.data_source.rsplit("/")[-1] for p in prompts] == ["a.jsonl", "a.jsonl", "arithmetic", "arithmetic"]
    assert [p.prompt_id for p in prompts] == [0, 1, 2, 3]


def test_fingerprint_follows_contents(tmp_path):
    tokenizer = make_tokenizer()
    base = load_prompts(write_jsonl(tmp_path / "a.jsonl", PLAIN_ROWS), tokenizer).fingerprint
    assert load_prompts(write_jsonl(tmp_path / "b.jsonl", PLAIN_ROWS), tokenizer).fingerprint == base
    other_answer = [PLAIN_ROWS[0], {**PLAIN_ROWS[1], "answer": "5"}]
    for rows in (other_answer, PLAIN_ROWS[::-1], PLAIN_ROWS[:1]):
        assert load_prompts(write_jsonl(tmp_path / "c.jsonl", rows), tokenizer).fingerprint != base


CHAT = [{"role": "user", "content": "q"}]
BAD = [
    ("missing file", "nowhere.jsonl", {}, r"data\.train = '.*nowhere.jsonl': no such file"),
    ("unknown format", "a.txt", {}, r"\.jsonl, \.parquet or \.csv"),
    ("bad json", '{"prompt": }', {}, r"a\.jsonl:1:12: not valid JSON"),
    ("not an object", "[1]", {}, r"a\.jsonl:1: a list"),
    ("empty", "", {}, "no rows"),
    ("prompt column", [{"promt": "q", "answer": 1}], {}, r"data\.prompt_column = 'prompt'.*did you mean 'promt'"),
    ("answer column", PLAIN_ROWS, {"answer_column": "anser"}, r"data\.answer_column = 'anser'.*did you mean 'answer'"),
    ("empty prompt", [{"prompt": "", "answer": 1}], {}, r"row 0: column 'prompt' \(data\.prompt_column\) is empty"),
    ("number as prompt", [{"prompt": 3, "answer": 1}], {}, "holds a int, not text"),
    ("not messages", [{"prompt": ["q"], "answer": 1}], {"chat": True}, "list of messages"),
    ("no template", [{"prompt": CHAT, "answer": 1}], {}, r"no chat template: give one as model\.chat_template"),
    ("template off", [{"prompt": CHAT}], {"chat": True, "apply_chat_template": False}, r"data\.apply_chat_template"),
    (
        "template asked",
        PLAIN_ROWS,
        {"apply_chat_template": True},
        r"data\.apply_chat_template = true.*no chat template",
    ),
    ("no slot", PLAIN_ROWS, {"prompt_template": "Q:"}, r"data\.prompt_template = 'Q:': must contain {prompt}"),
    ("half a character", [{"prompt": "a\ud800", "answer": 1}], {}, r"row 0: the tokenizer refused the prompt"),
    ("long number", '{"prompt": "q", "answer": ' + 5000 * "9" + "}", {}, r"a\.jsonl:1: cannot be read as JSON"),
    ("deep brackets", '{"prompt": "q", "answer": ' + 99999 * "[", {}, r"a\.jsonl:1: cannot be read as JSON"),
    ("options of a file", PLAIN_ROWS, {"options": {"a": 1}}, r"data\.train_options"),
]


@pytest.mark.parametrize(("content", "settings", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_errors_name_the_key(content, settings, message, tmp_path):
    settings = dict(settings)
    tokenizer = make_tokenizer(template=TEMPLATE if settings.pop("chat", False) else None)
    path = tmp_path / "a.jsonl"
    if isinstance(content, list):
        write_jsonl(path, content)
    elif content.endswith((".jsonl", ".txt")):
        path = tmp_path / content
    else:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        load_prompts(str(path), tokenizer, **settings)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "caf\xe9", "answer": 1}\n', r"a\.jsonl': is not UTF-8 text: byte 0xe9"),
        ("a.csv", b"prompt,answer\ncaf\xe9,1\n", r"a\.csv': is not UTF-8 text: byte 0xe9"),
        ("a.csv", b"prompt,answer\nq,1\nq\n", r"a\.csv:3: no field for column answer \(data\.train\)"),
        ("a.csv", b"prompt,answer\nq,1,2\n", r"a\.csv:2: more fields than the header"),
    ],
)
def test_files_of_another_making(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_prompts(str(tmp_path / name), make_tokenizer())


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(DataError, match="is a folder"):
        load_prompts(str(tmp_path / "a.jsonl"), make_tokenizer())


def test_missing_extras_are_named(tmp_path, monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] in ("pyarrow", "datasets", "reasoning_gym"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for source, extra in [
        (str(tmp_path / "a.parquet"), "data"),
        ("hub:someone/something", "data"),
        ("task:reasoning_gym/chain_sum", "reasoning"),
    ]:
        with pytest.raises(DataError, match=rf"fastrl\[{extra}\]"):
            load_prompts(source, make_tokenizer())


def test_damaged_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        load_prompts(str(tmp_path / "a.parquet"), make_tokenizer())
