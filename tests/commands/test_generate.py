"""`titanlite generate` and `titanlite.generate`: what they load, what they write, and that the cache changes the cost
only."""

import io
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands.test_eval import JOB, random_model, save_run

from titanlite import cli, completion, generate, generate_many, load_checkpoint
from titanlite.completion import LoadedCheckpoint, choose
from titanlite.config.errors import CheckpointError
from titanlite.config.load import PACKAGE, dump_config
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.model.llama import Llama

TOKENIZER = PACKAGE / "assets" / "tokenizer" / "tokenizer.model"
PROMPTS = ["def f", "import os, sys", "", "class A:", "x"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run with checkpoints of steps 10 and 20."""
    return save_run(tmp_path_factory.mktemp("run"), 10, 20)


@pytest.fixture(scope="module")
def loaded(trained: Path) -> LoadedCheckpoint:
    return load_checkpoint(trained)


def complete(capsys: pytest.CaptureFixture[str], folder: Path, *words: str, code: int = 0) -> tuple[str, str]:
    """Standard output and standard error of the command, which ends with `code`."""
    assert cli.main(["generate", "--checkpoint", str(folder), "--max-new-tokens", "12", *words]) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return out, " ".join(err.split())


def without_cache(model: Llama, tokenizer: Tokenizer, prompt: str) -> str:
    """The likeliest completion, by forward passes over the whole text."""
    ids = start = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    while len(ids) < len(start) + 30:
        logits = model(torch.tensor([ids]))[0, -1, : tokenizer.vocab_size]
        if int(logits.argmax()) == tokenizer.eos_id:
            break
        ids = [*ids, int(logits.argmax())]
    return tokenizer.decode(ids)[len(tokenizer.decode(start)) :]


@pytest.mark.parametrize("chunk", [1, 512])
def test_greedy_text_is_that_without_a_cache_whatever_is_beside_it(
    loaded: LoadedCheckpoint, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(completion, "PREFILL_CHUNK", chunk)
    expected = [without_cache(random_model(20), loaded.tokenizer, prompt) for prompt in PROMPTS]
    assert len({*expected}) == len(PROMPTS)
    for size in (1, 2, 5):
        done = list(generate_many(loaded, PROMPTS, 30, temperature=0, batch_size=size))
        assert [text.completion for text in done] == expected
        assert [text.prompt for text in done] == PROMPTS
    assert "".join(generate(loaded, PROMPTS[1], 30, temperature=0)) == expected[1]


def test_sampled_text_depends_on_its_seed_and_on_no_other_prompt(loaded: LoadedCheckpoint) -> None:
    texts = [list(generate_many(loaded, PROMPTS, 10, seed=5, batch_size=size)) for size in (1, 2, 5)]
    assert texts[0] == texts[1] == texts[2] != list(generate_many(loaded, PROMPTS, 10, seed=6))


@pytest.mark.parametrize(
    ("temperature", "top_k", "allowed"),
    [(0, 0, [1]), (1.0, 1, [1]), (1e-310, 0, [1]), (1.0, 2, [1, 3]), (0.5, 0, range(5)), (2.0, 99, range(5))],
)
def test_tokens_are_drawn_from_the_softmax_of_those_that_are_allowed(
    temperature: float, top_k: int, allowed: list[int]
) -> None:
    """0.04: five standard errors of 4,000 draws."""
    logits, generator = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0]), torch.Generator().manual_seed(0)
    chosen = torch.tensor([choose(logits, temperature, top_k, generator) for _ in range(4000)])
    expected = torch.zeros(5)
    expected[list(allowed)] = torch.softmax(logits[list(allowed)] / max(temperature, 1e-3), dim=-1)
    torch.testing.assert_close(torch.bincount(chosen, minlength=5) / 4000.0, expected, atol=0.04, rtol=0.0)


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
@pytest.mark.parametrize("text", ["def f(x):\n\treturn x", "naïve — 漢字かな 🦜🦜 \ufffd?"])
def test_pieces_are_whole_characters_and_add_up_to_the_text(
    loaded: LoadedCheckpoint, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    """A model that says `text`."""
    tokenizer = load_tokenizer(TOKENIZER.with_name(name))
    ids = iter([*tokenizer.encode(text), tokenizer.eos_id])
    monkeypatch.setattr(completion, "choose", lambda *args: next(ids))
    pieces = list(generate(replace(loaded, tokenizer=tokenizer), "a"))
    assert "".join(pieces) == text
    assert ["\ufffd" in piece for piece in pieces].count(True) == text.count("\ufffd")


def test_the_completion_is_on_standard_output_and_all_else_on_standard_error(
    capsys: pytest.CaptureFixture[str], trained: Path, loaded: LoadedCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = complete(capsys, trained, "--prompt", "import os", "--temperature", "0")
    assert out == "import os" + "".join(generate(loaded, "import os", 12, temperature=0)) + "\n"
    assert "step-00000020" in err
    assert "12 tokens" in err
    older = trained / "checkpoint" / "step-00000010"
    assert complete(capsys, older, "--prompt", "import os", "--temperature", "0")[0] != out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert complete(capsys, trained, "--prompt", "a\x1b[2J")[0].startswith(r"a\x1b[2J")


def test_prompts_of_a_file_and_of_standard_input(
    capsys: pytest.CaptureFixture[str], trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("def f\n\nimport os\r\n")
    (tmp_path / "a.jsonl").write_text('"def f"\n{"prompt": "import os"}\n{"prompt": "two\\nlines"}')
    expected = [complete(capsys, trained, "--prompt", prompt)[0] for prompt in ("def f", "import os")]
    assert complete(capsys, trained, "--prompts", str(tmp_path / "a.txt"))[0] == "".join(expected)
    found = complete(capsys, trained, "--prompts", str(tmp_path / "a.jsonl"), "--json")[0].splitlines()
    done = [json.loads(line) for line in found]
    assert [f"{one['prompt']}{one['completion']}\n" for one in done[:2]] == expected
    assert (done[2]["prompt"], done[0]["tokens"], done[0]["end"]) == ("two\nlines", 12, "length")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"def f\nimport os\n")))
    assert complete(capsys, trained, "--prompts", "-")[0] == "".join(expected)


@pytest.mark.parametrize(
    ("words", "content", "said"),
    [
        (["--prompts", "a.txt"], b"\n \n", "--prompts a.txt"),
        (["--prompts", "a.txt"], b"gr\xf6\xdfer", "--prompts a.txt"),
        (["--prompts", "a.jsonl"], b'"good"\n{"text": "x"}', "--prompts a.jsonl"),
        (["--prompts", "a.txt", "--prompt", "y"], b"x", "--prompts"),
        (["--prompt", "a b c d " * 30], None, "at most 63"),
        (["--batch-size", "0", "--seed", "-1"], None, "seed = -1.*batch_size = 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_completed(
    capsys: pytest.CaptureFixture[str], trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    words: list[str], content: bytes | None, said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(words[1]).write_bytes(content)
    assert re.search(said, complete(capsys, trained, *words, code=2)[1])


def test_damaged_checkpoints_and_another_tokenizer(
    capsys: pytest.CaptureFixture[str], trained: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    assert "no checkpoint here" in complete(capsys, tmp_path, code=4)[1]
    newest = run / "checkpoint" / "step-00000020"
    file = next(newest.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    err = complete(capsys, run)[1]
    assert "step-00000020 is damaged" in err
    assert "step-00000010:" in err
    assert "is damaged" in complete(capsys, newest, code=4)[1]
    (run / "config.toml").write_text(dump_config(JOB).replace("dim = 32", "dim = 64"))
    assert "does not fit" in complete(capsys, run, code=2)[1]
    (tmp_path / "other.model").write_bytes(b"".join(TOKENIZER.read_bytes().splitlines(keepends=True)[:-1]))
    tokenizer = JOB.tokenizer.model_copy(update={"path": str(tmp_path / "other.model")})
    (run / "config.toml").write_text(dump_config(JOB.model_copy(update={"tokenizer": tokenizer})))
    assert "another tokenizer" in complete(capsys, run, code=4)[1]


def test_logits_that_are_no_numbers_are_said_so() -> None:
    with pytest.raises(CheckpointError, match="not finite"):
        choose(torch.tensor([0.0, math.nan]), 0, 0, None)
