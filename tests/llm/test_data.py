"""Datasets of text: all sources give the same rows, errors name the line or row, and ids come from the
tokenizer."""

from __future__ import annotations

import json

import numpy as np
import pytest
from character_tokenizer import CHATML, character_tokenizer

from rlox.llm.data import Rows, encode, pair_rows, prompt_rows, read_rows, text_rows

TABLE = {"prompt": ["1+1=", 'say "a, b"\nplease'], "answer": ["2", "a, b"]}
OBJECTS = [dict(zip(TABLE, row, strict=True)) for row in zip(*TABLE.values(), strict=True)]
USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}
EOS = 2


# --- sources ---------------------------------------------------------------------------------------------------------


class HuggingFace:
    """The part of datasets.Dataset that rlox uses."""

    column_names = tuple(TABLE)

    def __getitem__(self, name):
        return iter(TABLE[name])  # like a Column of datasets, this is not a list


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def written(folder, suffix):
    path = folder / f"rows{suffix}"
    if suffix == ".jsonl":
        return write(path, "".join(f"{json.dumps(row)}\n\n" for row in OBJECTS))
    if suffix == ".json":
        return write(path, b"\xef\xbb\xbf" + json.dumps(OBJECTS).encode())  # with a byte-order mark, as on Windows
    if suffix == ".csv":
        return write(path, 'prompt,answer\r\n1+1=,2\r\n"say ""a, b""\nplease","a, b"\r\n')
    pa = pytest.importorskip("pyarrow")
    table = pa.table(TABLE)
    if suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
        return path
    path = folder / "rows.arrow"
    new = pa.ipc.new_stream if suffix == "stream" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet", ".arrow", "stream"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, suffix):
    path = written(tmp_path, suffix)
    rows = read_rows(path)
    assert rows.columns == TABLE
    assert (len(rows), rows.source) == (2, str(path))
    assert rows.fingerprint() == read_rows(OBJECTS).fingerprint()
    assert read_rows(str(path)).columns == TABLE


@pytest.mark.parametrize("source", [OBJECTS, tuple(OBJECTS), TABLE, HuggingFace()], ids=lambda s: type(s).__name__)
def test_every_object_gives_the_same_rows(source):
    assert read_rows(source).columns == TABLE


def test_rows_are_returned_unchanged_and_texts_become_prompts():
    rows = read_rows(["a", "b"])
    assert rows.columns == {"prompt": ["a", "b"]}
    assert read_rows(rows) is rows


def test_a_long_field_of_a_csv_file_is_read(tmp_path):
    import csv

    limit = csv.field_size_limit()
    text = "x" * (limit + 1)
    assert read_rows(write(tmp_path / "a.csv", f"text\n{text}\n")).columns == {"text": [text]}
    assert csv.field_size_limit() == limit


def test_texts_in_json_lines_may_contain_other_line_ends(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"prompt": "a\u2028b"}\n')
    assert read_rows(path).columns == {"prompt": ["a\u2028b"]}


def test_rows_select_in_the_given_order():
    rows = read_rows(TABLE)
    assert rows.select(np.array([1, 0, 1])) == {name: [b, a, b] for name, (a, b) in TABLE.items()}


def test_the_fingerprint_depends_on_all_values_and_their_order():
    same = Rows({"answer": TABLE["answer"], "prompt": TABLE["prompt"]}, "elsewhere")
    mark = read_rows(TABLE).fingerprint()
    assert len(mark) == 64
    assert same.fingerprint() == mark
    others = [
        Rows({name: column[::-1] for name, column in TABLE.items()}),
        Rows({"prompt": TABLE["prompt"]}),
        Rows({"prompt": TABLE["answer"], "answer": TABLE["prompt"]}),
        Rows({**TABLE, "answer": [2, "a, b"]}),
        Rows({"prompt": ["1+1=", 'say "a, b"\npleas'], "answer": ["e2", "a, b"]}),
    ]
    assert len({mark, *(rows.fingerprint() for rows in others)}) == 6
    assert Rows({"x": [np.arange(3), b"a"]}).fingerprint() == Rows({"x": [[0, 1, 2], "61"]}).fingerprint()
    with pytest.raises(TypeError, match=r"row 1: x must be a value that JSON supports, got <object"):
        Rows({"x": [1, object()]}).fingerprint()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.jsonl",
            '{"prompt": "a"}\n\n{"prompt": }\n',
            r"line 3 must be JSON, got '{\"prompt\": }' \(Expecting value",
        ),
        ("a.jsonl", '{"prompt": "a"}\n5\n', "line 2 must be an object such as .*, got 5"),
        ("a.jsonl", '{"prompt": "a"}\n{"promt": "b"}\n', "line 2 must have column 'prompt', as line 1 has.*'promt'"),
        ("a.jsonl", '{"prompt": "a"}\n\n{"prompt": "b", "n": 1}\n', "line 1 must have column 'n', as line 3 has"),
        ("a.jsonl", '{"prompt": "a"}\n{}\n', "line 2 must have column 'prompt', .*; write null"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2 must be UTF-8, got the byte 0xff"),
        ("a.jsonl", "[" * 100_000, "line 1 must be JSON, got "),
        ("a.jsonl", f'{{"n": {"9" * 5000}}}', "line 1 must be JSON, got "),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": "b", "prompt": "c"}', "line 2 must be.*has the key 'prompt' twice"),
        ("a.json", '[{"prompt": {"a": 1, "a": 1}}]', "an object has the key 'a' twice"),
        ("a.jsonl", "\n", "must hold at least one row, got none"),
        ("a.json", '[{"prompt": "a"},\n{"prompt" "b"}]', 'line 2 must be JSON, got \'{"prompt" "b"}]\'.*column 11'),
        ("a.json", '{"prompt": "a"}\n{"prompt": "b"}', "line 2 must be JSON.*name it .jsonl"),
        ("a.json", '{"prompt": ["a"]}', r"must hold a list of objects, got {'prompt': \['a'\]}"),
        ("a.json", '[{"prompt": "a"}, [1]]', r"row 1 must be an object such as .*, got \[1\]"),
        ("a.json", "[]", "must hold at least one row, got none"),
        ("a.csv", "prompt,answer\na,b\n\nc\n", "row that ends in line 4 must have 2 fields.*got 1"),
        ("a.csv", "prompt,answer\na,b,c\n", "row that ends in line 2 must have 2 fields.*got 3; put texts"),
        ("a.csv", "prompt,prompt\na,b\n", "names of columns must differ, got 'prompt' twice"),
        ("a.csv", 'prompt\n"a\n', "must be CSV, got unexpected end of data"),
        ("a.csv", "prompt\n", "must hold at least one row, got none"),
        ("a.csv", "", "must hold at least one row, got none"),
        ("a.parquet", "no", "must be a .parquet file, and is not"),
        ("a.arrow", "no", "must be a .arrow file, and is not"),
        ("a.txt", "no", "must end in one of .jsonl, .json, .csv, .parquet, .arrow, got 'a.txt'"),
    ],
)
def test_errors_in_a_file_name_the_line(tmp_path, name, text, message):
    if name.endswith(("parquet", "arrow")):
        pytest.importorskip("pyarrow")
    path = write(tmp_path / name, text)
    with pytest.raises(ValueError, match=message) as info:
        read_rows(path)
    assert str(info.value).startswith(f"dataset {path}: ")


def test_a_missing_file_is_an_error_with_a_suggestion(tmp_path):
    write(tmp_path / "train.jsonl", "")
    with pytest.raises(FileNotFoundError, match=r"no such file; did you mean 'train.jsonl'\?"):
        read_rows(tmp_path / "trian.jsonl")
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere$"):
        read_rows(tmp_path / "nowhere" / "a.jsonl")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ValueError, match="must be an ordinary file"):
        read_rows(tmp_path / "folder.json")


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (5, TypeError, r"source must be a path, a list of dicts .*, got 5; pass a streamed dataset"),
        ([], ValueError, "at least one row"),
        ({}, ValueError, "at least one row"),
        ({"prompt": "abc"}, ValueError, "column prompt must be a list, got 'abc'"),
        ({"prompt": ["a"], "answer": []}, ValueError, "column answer must have 1 rows, as column prompt has, got 0"),
        ({3: ["a"]}, TypeError, "names of columns must be texts, got 3"),
        (["a", {"prompt": "b"}], ValueError, "row 1 must be a text, as other rows are"),
        ([{"prompt": "a"}, {"promt": "b"}], ValueError, r"row 1 must have column 'prompt'.*did you mean 'promt'\?"),
        ([{"prompt": "a"}, 5], ValueError, "row 1 must be an object"),
        (
            {"train": HuggingFace(), "test": HuggingFace()},
            ValueError,
            "one split, got train, test; pass source.'train'",
        ),
    ],
)
def test_errors_in_an_object_name_the_row(source, error, message):
    with pytest.raises(error, match=message):
        read_rows(source)


def test_without_pyarrow_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ImportError, match="pip install pyarrow"):
        read_rows(write(tmp_path / "a.parquet", ""))


# --- tasks -----------------------------------------------------------------------------------------------------------


def test_prompts_are_texts_or_chats_and_rewards_get_the_rest():
    rows = prompt_rows(read_rows({"prompt": ["a", [USER]], "answer": [1, 2]}))
    assert (rows.prompts, rows.columns, len(rows)) == (["a", [USER]], {"answer": [1, 2]}, 2)


def test_pairs():
    columns = {"prompt": ["a", [USER]], "chosen": ["b", [ASSISTANT]], "rejected": ["c", "d"], "source": ["x", "y"]}
    pairs = pair_rows(read_rows(columns))
    assert (pairs.prompts, pairs.chosen, pairs.rejected) == tuple(columns[k] for k in ("prompt", "chosen", "rejected"))
    assert (pairs.columns, len(pairs)) == ({"source": ["x", "y"]}, 2)


def test_the_prompt_of_two_chats_is_their_common_prefix():
    system, worse = {"role": "system", "content": "be brief"}, {"role": "assistant", "content": "no"}
    columns = {
        "chosen": [[USER, ASSISTANT], [system, USER, ASSISTANT], [USER, ASSISTANT]],
        "rejected": [[USER, worse], [system, USER, worse, USER, worse], [USER, ASSISTANT]],
    }
    pairs = pair_rows(read_rows(columns))
    assert pairs.prompts == [[USER], [system, USER], [USER]]
    assert pairs.chosen == [[ASSISTANT], [ASSISTANT], [ASSISTANT]]
    assert pairs.rejected == [[worse], [worse, USER, worse], [ASSISTANT]]
    assert columns["chosen"][0] == [USER, ASSISTANT]  # the input is not changed


@pytest.mark.parametrize(
    ("columns", "prompts", "completions", "rest"),
    [
        ({"prompt": ["a"], "completion": ["b"], "n": [1]}, ["a"], ["b"], {"n": [1]}),
        ({"prompt": [[USER]], "completion": [[ASSISTANT]]}, [[USER]], [[ASSISTANT]], {}),
        ({"messages": [[USER, ASSISTANT]], "n": [1]}, [[USER]], [[ASSISTANT]], {"n": [1]}),
        ({"text": ["a b"], "n": [1]}, [None], ["a b"], {"n": [1]}),
        ({"text": ["a b"], "messages": [[USER, ASSISTANT]]}, [[USER]], [[ASSISTANT]], {"text": ["a b"]}),
    ],
)
def test_demonstrations(columns, prompts, completions, rest):
    texts = text_rows(read_rows(columns))
    assert (texts.prompts, texts.completions, texts.columns, len(texts)) == (prompts, completions, rest, 1)


@pytest.mark.parametrize(
    ("view", "columns", "expected"),
    [
        (prompt_rows, {"promt": ["a"]}, r"must have column 'prompt', got none; did you mean 'promt'\?"),
        (prompt_rows, {"prompt": ["a", None]}, "row 1: prompt must be a text, or a chat such as .*, got None"),
        (prompt_rows, {"prompt": ["a", []]}, r"row 1: prompt must be a text, or a chat such as .*, got \[\]"),
        (
            prompt_rows,
            {"prompt": [[USER, {"role": "user"}]]},
            "row 0: message 1 of prompt must have the text 'content'",
        ),
        (prompt_rows, {"prompt": [["hi"]]}, "row 0: message 0 of prompt must have the text 'role', got 'hi'"),
        (pair_rows, {"prompt": ["a"], "chosen": ["b"], "reject": ["c"]}, "column 'rejected', got none.*'reject'"),
        (pair_rows, {"chosen": ["b"], "rejected": ["c"]}, "must have column 'prompt', got none"),
        (
            pair_rows,
            {"chosen": [[USER, ASSISTANT]], "rejected": [[ASSISTANT]]},
            "row 0: chosen and rejected must begin",
        ),
        (
            pair_rows,  # a chat that repeats its prompt, as in UltraFeedback
            {"prompt": ["hi"], "chosen": [[USER, ASSISTANT]], "rejected": [[USER, ASSISTANT]]},
            "row 0: chosen must be a text, as prompt is, .*leave column 'prompt' out",
        ),
        (
            pair_rows,
            {"prompt": [[USER]], "chosen": ["b"], "rejected": [[USER, ASSISTANT]]},
            "row 0: rejected must begin with a message of role 'assistant'",
        ),
        (text_rows, {"txt": ["a"]}, r"or 'messages', or 'text', got none of them; did you mean 'txt'\?"),
        (text_rows, {"prompt": ["a"]}, "must have column 'completion', got none"),
        (text_rows, {"prompt": ["a", "b"], "completion": ["c", 4]}, "row 1: completion must be a text, or a chat"),
        (text_rows, {"prompt": ["a"], "completion": [[ASSISTANT]]}, "row 0: completion must be a text, as prompt is"),
        (text_rows, {"messages": [[USER, ASSISTANT], [USER]]}, "row 1: messages must be a chat of at least two"),
        (text_rows, {"messages": [[ASSISTANT, USER]]}, "row 0: messages must be .* ends with one of role 'assistant'"),
        (text_rows, {"text": [[USER]]}, "row 0: text must be a text, got .*; name it 'messages'"),
    ],
)
def test_missing_values_of_a_task_are_named_by_row_and_column(view, columns, expected):
    with pytest.raises(ValueError, match=expected) as info:
        view(read_rows(columns))
    assert str(info.value).startswith(f"{view.__name__}: dataset <dict>: ")


# --- token ids -------------------------------------------------------------------------------------------------------


def ids_of(tokenizer, text):
    return tokenizer.convert_tokens_to_ids(list(text))


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("appends_eos", [False, True])
def test_a_prompt_has_the_tokenizers_special_tokens_and_no_eos(bos, appends_eos):
    tokenizer = character_tokenizer(bos=bos, appends_eos=appends_eos)
    assert tokenizer("ab")["input_ids"] == [1] * bos + ids_of(tokenizer, "ab") + [EOS] * appends_eos  # the premise
    prompt, completion = encode(tokenizer, "ab", "cd")
    assert prompt == [1] * bos + ids_of(tokenizer, "ab")
    assert completion == [*ids_of(tokenizer, "cd"), EOS]
    assert encode(tokenizer, "ab") == (prompt, [])
    # An EOS in the text itself is kept.
    assert encode(tokenizer, "ab</s>", "")[0] == [*prompt, EOS]


@pytest.mark.parametrize(
    ("completion", "add_eos", "ids"),
    [
        ("c</s>", True, "c!"),
        ("c", False, "c"),
        ("c</s>", False, "c!"),
        ("", True, "!"),
        ("", False, ""),
        ("c</s>d", True, "c!d!"),
    ],
)
def test_a_completion_ends_with_one_eos(completion, add_eos, ids):
    tokenizer = character_tokenizer()
    wanted = [EOS if c == "!" else ids_of(tokenizer, c)[0] for c in ids]
    assert encode(tokenizer, "ab", completion, add_eos=add_eos)[1] == wanted


def test_a_text_without_a_prompt_has_special_tokens_and_one_eos():
    tokenizer = character_tokenizer(bos=True, appends_eos=True)
    assert encode(tokenizer, None, "ab") == ([], [1, *ids_of(tokenizer, "ab"), EOS])
    with pytest.raises(ValueError, match="row 4: text must have at least one token, got ''"):
        encode(character_tokenizer(), None, "", row=4)


def test_a_bos_that_is_also_the_eos_stays():
    tokenizer = character_tokenizer(bos=True)
    tokenizer.eos_token = "<s>"
    assert encode(tokenizer, "", "a") == ([1], [*ids_of(tokenizer, "a"), 1])
    assert encode(tokenizer, "<s>")[0] == [1, 1]


def test_a_chat_is_rendered_by_the_template_and_the_completion_continues_it():
    tokenizer = character_tokenizer(template=CHATML)
    prompt, completion = encode(tokenizer, [USER], [ASSISTANT])
    assert tokenizer.decode(prompt) == "@user\nhi</s>\n@assistant\n"
    assert completion == [*ids_of(tokenizer, "hello"), EOS]  # without the newline that the template adds
    assert encode(tokenizer, [USER], "hello") == (prompt, completion)
    assert encode(tokenizer, [USER]) == (prompt, [])
    several = encode(tokenizer, [USER], [ASSISTANT, USER, ASSISTANT])[1]
    assert tokenizer.decode(several) == "hello</s>\n@user\nhi</s>\n@assistant\nhello</s>"
    assert tokenizer.decode(encode(tokenizer, [USER], "hello", add_eos=False)[1]) == "hello</s>\n"


def test_eos_is_added_if_a_template_ends_without_it():
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer = character_tokenizer(template=f"{plain}{{% if add_generation_prompt %}}assistant: {{% endif %}}")
    prompt, completion = encode(tokenizer, [USER], [ASSISTANT])
    assert tokenizer.decode([*prompt, *completion]) == "user: hi\nassistant: hello\n</s>"


def test_the_completion_is_the_answer_alone_if_a_template_rewrites_the_prompt():
    counting = "{{ messages | length }}{% for m in messages %}|{{ m.content }}{% endfor %}"
    tokenizer = character_tokenizer(template=counting)
    prompt, completion = encode(tokenizer, [USER], [ASSISTANT])
    assert tokenizer.decode(prompt) == "1|hi"
    assert completion == [*ids_of(tokenizer, "hello"), EOS]
    with pytest.raises(ValueError, match=r"must render the prompt the same when messages follow.*got 3 messages"):
        encode(tokenizer, [USER], [ASSISTANT, USER, ASSISTANT])


def test_a_tokenizer_without_offsets_is_accepted():
    class Older:
        eos_token_id, chat_template = 9, "{{ messages }}"

        def __call__(self, text, add_special_tokens):
            return {"input_ids": np.array([len(text)])}

        def apply_chat_template(self, chat, tokenize, add_generation_prompt=False):
            return "ab" if add_generation_prompt else "abcde"

    assert encode(Older(), [USER], "a") == ([2], [3, 9])
    assert encode(Older(), "abc", "d") == ([3], [1, 9])


@pytest.mark.parametrize(
    ("options", "prompt", "completion", "error", "message"),
    [
        ({}, "", "a", ValueError, "encode: row 3: prompt must have at least one token, got ''"),
        ({}, [USER], "a", ValueError, "row 3: tokenizer must have a chat template if a prompt is a chat, got None"),
        ({"eos": None}, "a", "b", ValueError, "row 3: tokenizer must have an EOS, which ends completions, got None"),
        ({}, "a", [ASSISTANT], ValueError, "row 3: completion must be a text, as prompt is, got"),
        ({}, 5, "a", ValueError, "row 3: prompt must be a text, or a chat such as .*, got 5"),
        ({}, "a", 5, ValueError, "row 3: completion must be a text, or a chat such as .*, got 5"),
    ],
)
def test_errors_of_encoding_name_the_row(options, prompt, completion, error, message):
    with pytest.raises(error, match=message):
        encode(character_tokenizer(**options), prompt, completion, row=3)


def test_a_bare_tokenizer_of_tokenizers_is_an_error_with_a_remedy():
    with pytest.raises(
        TypeError, match=r"tokenizer must be one of transformers.*PreTrainedTokenizerFast\(tokenizer_obj"
    ):
        encode(character_tokenizer().backend_tokenizer, "a")


def test_errors_of_a_template_name_the_row():
    tokenizer = character_tokenizer(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(Exception, match="roles must alternate") as info:
        encode(tokenizer, [USER], row=3)
    assert info.value.__notes__ == ["rlox: encode: row 3: the tokenizer's chat template failed"]
