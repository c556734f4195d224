"""`titanlite generate`: what it loads, what it writes, and that the cache changes the cost only."""

import io
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titanlite import cli, completion
from titanlite.checkpoint import step_folders
from titanlite.checkpoint.find import use_newest
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.live_tensors import LiveState
from titanlite.checkpoint.save import Saver
from titanlite.commands import generate as command
from titanlite.commands.generate import read_prompts, write
from titanlite.completion import (
    TextStream,
    choose,
    encode_prompt,
    generate_batch,
    generate_many,
    generate_tokens,
    load_checkpoint,
    next_logits,
)
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.flavors import Architecture, architecture
from titanlite.config.load import PACKAGE, dump_config
from titanlite.config.schema import JobConfig
from titanlite.data.tokenizer import load_tokenizer
from titanlite.model.attention import LayerCache
from titanlite.model.llama import Llama

TOKENIZER = PACKAGE / "assets" / "tokenizer" / "tokenizer.model"
ARCH = Architecture(48, 2, 6, 2, 64, vocab_size=307, max_seq_len=48, rope_scaling_factor=4.0)
JOB = JobConfig.model_validate(
    {
        "job": {"dump_folder": "unused"},
        "model": {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "max_seq_len": 40},
    }
)


def random_model(arch, seed=0):
    """Weights large enough that the likeliest token is far from a tie."""
    model = Llama(arch)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]))
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TOKENIZER)


@pytest.fixture(scope="module", params=["tokenizer.model", "tokenizer.json"])
def either_tokenizer(request):
    return load_tokenizer(TOKENIZER.with_name(request.param))


def save_run(folder, fingerprint, steps, **more):
    """What a training run leaves: config.toml, and checkpoints whose weights differ."""
    (folder / "config.toml").write_text(dump_config(JOB))
    dist.init_process_group("gloo", init_method=f"file://{folder}.rendezvous", rank=0, world_size=1)
    try:
        for step in steps:
            model = random_model(architecture(JOB.model), seed=step)
            checkpoints = CheckpointFolder(JOB.checkpoint, folder / "checkpoint", lambda line: None)
            saver = Saver(checkpoints, LiveState(model), **more)
            saver.save(step, {"step": step, "tokens": 0, "data": {"version": 1, "tokenizer": fingerprint}})
    finally:
        dist.destroy_process_group()
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tokenizer):
    """The output folder of a run with checkpoints of steps 10 and 20."""
    return save_run(tmp_path_factory.mktemp("run"), tokenizer.fingerprint, (10, 20))


@pytest.fixture
def run(trained, tmp_path):
    """A copy of `trained` that a test may damage."""
    return shutil.copytree(trained, tmp_path / "run")


def complete(capsys, folder, *words):
    """Standard output and standard error of the command."""
    command.main(["--checkpoint", str(folder), "--max-new-tokens", "12", *words])
    return capsys.readouterr()


# ---------------------------------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("length", [1, 5, 30])
def test_greedy_tokens_with_cache_equal_those_without(length):
    model = random_model(ARCH)
    prompt = torch.randint(ARCH.vocab_size, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    ids = list(prompt)
    for _ in range(18):
        ids.append(int(next_logits(model, [ids], cache=None)[0].argmax()))
    assert list(generate_tokens(model, prompt, 18)) == ids[length:]
    assert len(set(ids[length:])) > 3  # not a loop of one token, which anything would reproduce


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_logits_with_cache_equal_those_without(monkeypatch, chunk):
    """1e-5 of the largest: attention over the cache takes another kernel, which sums in another order."""
    monkeypatch.setattr(completion, "PREFILL_CHUNK", chunk)
    model = random_model(ARCH)
    ids = torch.randint(ARCH.vocab_size, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    cache = [LayerCache((1, 2, 40, 8), torch.float32, torch.device("cpu")) for _ in range(2)]
    for first, last in ((0, 20), (20, 39), (39, 40)):
        cached, whole = next_logits(model, [ids[first:last]], cache), next_logits(model, [ids[:last]], cache=None)
        assert ((cached - whole).abs().max() / whole.abs().max()).item() < 1e-5


def test_stops_at_the_models_maximum_length():
    assert len(list(generate_tokens(random_model(ARCH), [1] * 40, 100))) == 8


def test_stops_at_the_end_of_the_document_and_does_not_show_it():
    model = random_model(ARCH)
    free = list(generate_tokens(model, [1, 2], 10))
    end = free[6]
    assert list(generate_tokens(model, [1, 2], 10, eos_id=end)) == free[: free.index(end)]


# ------------------------------------------------------------------------------------------------------- the sampling

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def frequencies(**settings):
    generator = torch.Generator().manual_seed(0)
    chosen = torch.tensor([choose(LOGITS, generator=generator, **settings) for _ in range(4000)])
    return torch.bincount(chosen, minlength=5) / 4000


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_from_the_softmax_at_the_temperature(temperature):
    """0.04: five standard errors of 4,000 draws."""
    expected = torch.softmax(LOGITS / temperature, dim=-1)
    torch.testing.assert_close(frequencies(temperature=temperature, top_k=0), expected, atol=0.04, rtol=0.0)


def test_top_k_leaves_out_all_but_the_likeliest():
    found = frequencies(temperature=1.0, top_k=2)
    assert found[[0, 2, 4]].tolist() == [0, 0, 0]
    torch.testing.assert_close(found[[1, 3]], torch.softmax(torch.tensor([3.0, 2.0]), 0), atol=0.04, rtol=0.0)


@pytest.mark.parametrize("settings", [{"temperature": 0, "top_k": 0}, {"temperature": 1.0, "top_k": 1}])
def test_greedy_always_takes_the_likeliest(settings):
    assert frequencies(**settings).tolist() == [0, 1, 0, 0, 0]


def test_top_k_beyond_the_vocabulary_takes_all():
    assert torch.equal(frequencies(temperature=1.0, top_k=99), frequencies(temperature=1.0, top_k=0))


@pytest.mark.parametrize(("temperature", "shares"), [(1e-310, [0, 1, 0, 0, 0]), (1e40, [0.2] * 5)])
def test_extreme_temperatures_do_not_overflow(temperature, shares):
    torch.testing.assert_close(
        frequencies(temperature=temperature, top_k=0), torch.tensor(shares) * 1.0, atol=0.04, rtol=0
    )


def test_useless_weights_are_named_instead_of_sampled():
    with pytest.raises(CheckpointError, match="not finite"):
        choose(torch.tensor([0.0, math.nan]), 0, 0, None)


def test_ids_beyond_the_tokenizer_are_never_chosen():
    model = random_model(ARCH)
    tokens = list(
        generate_tokens(model, [1], 40, temperature=5.0, generator=torch.Generator().manual_seed(0), vocab_size=11)
    )
    assert max(tokens) < 11


# ----------------------------------------------------------------------------------------------------------- the text


@pytest.mark.parametrize("text", ["def f(x):\n\treturn x", "naïve — 漢字かな 🦜🦜 ", "é", "\ufffd?", ""])
def test_streamed_pieces_add_up_to_the_text(either_tokenizer, text):
    stream = TextStream(either_tokenizer, [either_tokenizer.bos_id])
    pieces = [stream.push(token) for token in either_tokenizer.encode(text)]
    assert "".join(pieces) + stream.rest() == text


def test_no_piece_shows_half_a_character(either_tokenizer):
    ids = either_tokenizer.encode("🦜!")
    assert len(ids) > 2  # the bird spans tokens
    stream = TextStream(either_tokenizer, ids[-1:])
    pieces = [stream.push(token) for token in ids]
    assert [piece for piece in pieces if piece] == ["🦜", "!"]


def test_a_character_cut_short_is_shown_at_the_end(either_tokenizer):
    stream = TextStream(either_tokenizer, [either_tokenizer.bos_id])
    assert stream.push(either_tokenizer.encode("🦜")[0]) == ""
    assert stream.rest() == "\ufffd"


def test_prompt_begins_like_a_document(tokenizer):
    assert encode_prompt("import os", tokenizer, 40) == [tokenizer.bos_id, *tokenizer.encode("import os")]
    assert encode_prompt("", tokenizer, 40) == [tokenizer.bos_id]


# -------------------------------------------------------------------------------------------------------- the command


def test_prints_prompt_and_completion_and_nothing_else_on_standard_output(capsys, trained, tokenizer):
    out, err = complete(capsys, trained, "--prompt", "import os", "--temperature", "0")
    model = random_model(architecture(JOB.model), seed=20)
    ids = encode_prompt("import os", tokenizer, 40)
    expected = generate_tokens(model, ids, 12, eos_id=tokenizer.eos_id, vocab_size=tokenizer.vocab_size)
    assert out == "import os" + tokenizer.decode(list(expected)) + "\n"
    assert "step-00000020" in err
    assert "12 tokens" in err


@pytest.mark.parametrize(("terminal", "shown"), [(True, r"a\x1b[2J\u202eb" + "\n"), (False, "a\x1b[2J\u202eb\n")])
def test_a_terminal_gets_no_control_characters_and_a_file_gets_the_text_as_it_is(capsys, monkeypatch, terminal, shown):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    for piece in ("a\x1b", "[2J\u202eb", "\n"):
        write(piece)
    assert capsys.readouterr().out == shown


def test_same_seed_same_text_other_seed_other_text(capsys, trained):
    first, again, other = (complete(capsys, trained, "--prompt", "x", "--seed", s).out for s in ("3", "3", "4"))
    assert first == again != other


def test_any_of_the_three_folders_will_do(trained, monkeypatch):
    newest = trained / "checkpoint" / "step-00000020"
    older = trained / "checkpoint" / "step-00000010"
    for folder, found in ((trained, newest), (trained / "checkpoint", newest), (newest, newest), (older, older)):
        assert use_newest(folder, Path) == found
    monkeypatch.chdir(newest)
    assert use_newest(Path("."), Path) == newest


def test_older_step_has_its_own_weights(capsys, trained):
    texts = {complete(capsys, trained / "checkpoint" / s, "--temperature", "0").out for s in ("step-00000010", ".")}
    assert len(texts) == 2


def test_a_damaged_newest_step_is_named_and_the_older_one_taken(capsys, run):
    file = next((run / "checkpoint" / "step-00000020").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    err = complete(capsys, run).err
    assert "step-00000020 is damaged" in err
    assert "step-00000010:" in err


def test_the_checksums_are_taken_once(capsys, trained, monkeypatch):
    taken: list[str] = []
    verify = step_folders.verify_folder
    monkeypatch.setattr(
        step_folders, "verify_folder", lambda path, share: (taken.append(path.name), verify(path, share))[1]
    )
    complete(capsys, trained)
    assert taken == ["step-00000020"]


def test_a_damaged_step_that_was_asked_for_is_refused(run):
    step = run / "checkpoint" / "step-00000020"
    file = next(step.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is damaged"):
        command.main(["--checkpoint", str(step)])


@pytest.mark.parametrize("name", ["nowhere", "~nobody123/x", "x" * 256])
def test_missing_folder(name):
    with pytest.raises(UserError, match=r"does not exist|is no path") as caught:
        command.main(["--checkpoint", name])
    assert caught.value.exit_code == 2


def test_folder_without_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        command.main(["--checkpoint", str(tmp_path)])


def test_without_the_runs_configuration(run):
    (run / "config.toml").unlink()
    with pytest.raises(CheckpointError, match=r"config\.toml"):
        command.main(["--checkpoint", str(run / "checkpoint")])


def test_job_in_the_manifest_wins_over_the_file(tmp_path, tokenizer, capsys):
    """The folder's config.toml is of the last run in it; the manifest's is of the one that saved."""
    save_run(tmp_path, tokenizer.fingerprint, (5,), job=JOB.model_dump(mode="json"))
    expected = complete(capsys, tmp_path).out
    (tmp_path / "config.toml").write_text(dump_config(JOB).replace("dim = 32", "dim = 64"))
    assert complete(capsys, tmp_path).out == expected


def test_a_configuration_of_another_model_is_refused(run):
    (run / "config.toml").write_text(dump_config(JOB).replace("dim = 32", "dim = 64"))
    with pytest.raises(UserError, match="does not fit"):
        command.main(["--checkpoint", str(run)])


def test_another_tokenizer_is_refused(run, tmp_path, monkeypatch):
    same = load_tokenizer(TOKENIZER.with_name("tokenizer.json"))
    monkeypatch.setattr(completion, "load_tokenizer", lambda path: same)
    command.main(["--checkpoint", str(run), "--max-new-tokens", "1"])  # another file, and the same ids
    (tmp_path / "tokenizer.model").write_bytes(b"".join(TOKENIZER.read_bytes().splitlines(keepends=True)[:-1]))
    other = load_tokenizer(tmp_path / "tokenizer.model")
    monkeypatch.setattr(completion, "load_tokenizer", lambda path: other)
    with pytest.raises(CheckpointError, match="another tokenizer"):
        command.main(["--checkpoint", str(run)])


# ---------------------------------------------------------------------------------------------------- several prompts


def test_prompts_of_other_lengths_beside_it_do_not_change_a_completion():
    model = random_model(ARCH)
    prompts = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18], [2, 3]]
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9}]
    for settings in kinds:
        generators = [torch.Generator().manual_seed(3) for _ in prompts]
        together = [[] for _ in prompts]
        for row, token in generate_batch(model, prompts, 12, generators=generators, **settings):
            together[row].append(token)
        for prompt, tokens in zip(prompts, together, strict=True):
            generator = [torch.Generator().manual_seed(3)]
            assert tokens == [
                token for _, token in generate_batch(model, [prompt], 12, generators=generator, **settings)
            ]


def test_each_prompt_ends_for_itself():
    model, ended, found = random_model(ARCH), set(), []
    long = list(range(ARCH.max_seq_len - 3))
    for row, _ in generate_batch(model, [[1, 2], long, [4]], 9, generators=[None] * 3, ended=ended):
        found.append(row)
        if found.count(2) == 4:
            ended.add(2)
    assert [found.count(row) for row in range(3)] == [9, 3, 4]


def test_completions_do_not_depend_on_the_size_of_the_batch(trained):
    loaded, prompts = load_checkpoint(trained), ["def f", "import os, sys", "", "class A:", "x"]
    results = [
        list(generate_many(loaded, prompts, 10, seed=5, batch_size=size, top_p=0.8, stop=("e",))) for size in (1, 2, 5)
    ]
    assert results[0] == results[1] == results[2]
    assert [done.prompt for done in results[0]] == prompts
    assert len({done.completion for done in results[0]}) > 1


def test_the_likeliest_tokens_up_to_top_p_are_chosen_from():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for top_p, allowed in ((0.4, {0}), (0.5, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        generator = torch.Generator().manual_seed(0)
        assert {choose(logits, 1.0, 0, generator, top_p) for _ in range(300)} == allowed


@pytest.mark.parametrize(
    ("stop", "shown", "end"),
    [
        ((), "abc abd abe", "length"),
        (("abd",), "abc ", "stop"),
        (("abx", "c a"), "ab", "stop"),
        (("abe!",), "abc abd abe", "length"),
    ],
)
def test_a_stop_text_ends_the_text_before_it_and_no_part_of_it_is_shown(either_tokenizer, stop, shown, end):
    ids = either_tokenizer.encode("abc abd abe")
    stream, pieces = TextStream(either_tokenizer, [], stop), []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.end == "stop":
            break
    assert ("".join(pieces) + stream.rest(), stream.end) == (shown, end)


def test_a_stream_stops_where_all_at_once_stops(capsys, trained):
    whole = complete(capsys, trained, "--prompt", "def").out[3:-1]
    stop = whole[len(whole) // 2 :][:2]
    out = complete(capsys, trained, "--prompt", "def", "--stop", stop).out
    assert out == "def" + whole[: whole.index(stop)] + "\n"
    (line,) = complete(capsys, trained, "--prompt", "def", "--stop", stop, "--json").out.splitlines()
    assert json.loads(line)["completion"] == whole[: whole.index(stop)]
    assert json.loads(line)["end"] == "stop"


def test_prompts_of_a_file_and_of_standard_input(capsys, trained, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("def f\n\nimport os\r\n")
    (tmp_path / "a.jsonl").write_text('"def f"\n{"prompt": "import os"}\n{"prompt": "two\\nlines"}')
    expected = [complete(capsys, trained, "--prompt", prompt).out for prompt in ("def f", "import os")]
    assert complete(capsys, trained, "--prompts", str(tmp_path / "a.txt")).out == "".join(expected)
    lines = complete(capsys, trained, "--prompts", str(tmp_path / "a.jsonl"), "--json").out.splitlines()
    found = [json.loads(line) for line in lines]
    assert [f"{done['prompt']}{done['completion']}\n" for done in found[:2]] == expected
    assert found[2]["prompt"] == "two\nlines"
    assert found[0]["tokens"] == 12
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"def f\nimport os\n")))
    assert complete(capsys, trained, "--prompts", "-").out == "".join(expected)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.txt", None, "No such file"),
        ("empty.txt", b"\n \n", "there is no prompt"),
        ("a.txt", b"gr\xf6\xdfer", "not valid UTF-8"),
        ("a.jsonl", b'"good"\n{', "line 2: not valid JSON"),
        ("b.jsonl", b'{"text": "x"}', 'line 1: must be a JSON text, or an object whose "prompt" is one'),
    ],
)
def test_a_file_of_prompts_that_cannot_be_used(trained, tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(said)):
        command.main(["--checkpoint", str(trained), "--prompts", str(tmp_path / name)])


def test_one_prompt_and_several_are_not_mixed(trained, tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="give one of them"):
        command.main(["--checkpoint", str(trained), "--prompts", str(tmp_path / "a.txt"), "--prompt", "y"])


def test_prompt_longer_than_the_model(trained):
    with pytest.raises(UserError, match=r"at most 39 fit into the model. Shorten it"):
        command.main(["--checkpoint", str(trained), "--prompt", "a b c d " * 30])


def test_all_wrong_values_are_reported_together(trained):
    words = [
        "--top-p",
        "0",
        "--batch-size",
        "0",
        "--temperature",
        "-1",
        "--top-k",
        "-2",
        "--max-new-tokens",
        "0",
        "--seed",
        str(2**64),
    ]
    with pytest.raises(UserError) as caught:
        command.main(["--checkpoint", str(trained), *words])
    message = str(caught.value)
    for found in (
        "--top-p 0",
        "--batch-size 0",
        "--temperature -1.0",
        "--top-k -2",
        "--max-new-tokens 0",
        f"--seed {2**64}",
    ):
        assert found in message


def test_exit_codes(capsys, trained):
    good = cli.main(["generate", "--checkpoint", str(trained), "--prompt", "x", "--max-new-tokens", "2"])
    assert (good, capsys.readouterr().out[0]) == (0, "x")
    assert cli.main(["generate", "--checkpoint", str(trained), "--temperature", "-1"]) == 2
    assert cli.main(["generate", "--checkpoint", str(trained / "nowhere")]) == 2
    assert cli.main(["generate", "--checkpoint", str(trained.parent)]) == 4  # no checkpoint in it
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err


def test_prompts_from_a_closed_or_a_boundless_standard_input_are_refused(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UserError, match="standard input is closed"):
        read_prompts(Path("-"))
    monkeypatch.setattr(command, "MOST_BYTES", 8)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"nine bytes")))
    with pytest.raises(UserError, match="more than 8 bytes"):
        read_prompts(Path("-"))
