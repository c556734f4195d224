"""Documented commands, programs, outputs and links work, and the documentation site builds.

Training is shortened unless TITANLITE_TUTORIALS=whole is set.
"""

import importlib.util
import inspect
import json
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from from_torchtitan.test_migrate import OF_02
from hub import Hub
from ranks import free_port
from small_runs import ROOT, run_program
from test_package import copy_repository

from titanlite.cli import COMMANDS
from titanlite.config.schema import list_keys

README = (ROOT / "README.md").read_text()
MAX_PAGE_WORDS = 1500
WHOLE = os.environ.get("TITANLITE_TUTORIALS") == "whole"
PROGRAMS = {
    page: re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)
    for page in ROOT.glob("docs/**/*.md")
}
# Each run of the tutorials would otherwise take minutes.
SHORT = (
    " --training.steps 4 --checkpoint.interval 4 --training.seq_len 64 "
    "--training.local_batch_size 1 --model.n_layers 1"
)
PYTHON = shlex.quote(sys.executable)


def run(command: str, folder: Path, **variables: str) -> str:
    """Run shell commands, and return their output and errors."""
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    bash = ("bash", "-euo", "pipefail", "-c", command)
    done = run_program(*bash, folder=folder, variables=variables, timeout=1800 if WHOLE else 600)
    return done.stdout + done.stderr


def read_blocks(page: str) -> list[tuple[str, str, str]]:
    """Return language, title and text of each code block on a page."""
    block = r'^```(\w*)(?: title="(.*?)")?\n(.*?)^```$'
    text = (ROOT / "docs" / page).read_text()
    return re.findall(block, text, flags=re.DOTALL | re.MULTILINE)


def read_samples(page: str) -> list[str]:
    """Return the sample outputs of a page, its blocks without a language."""
    return [text for language, _, text in read_blocks(page) if not language]


def find_missing_lines(sample: str, said: str) -> list[str]:
    """Return the lines of a sample that are missing in the output, ignoring numbers and bars."""
    masks = {r"\d[\d,.:]*": "0", "[▁-█]+": "█"}

    def masked(text: str) -> list[str]:
        for pattern, by in masks.items():
            text = re.sub(pattern, by, text)
        lines = [" ".join(line.split()) for line in text.splitlines()]
        return [line for line in lines if line not in ("", "...")]

    return [line for line in masked(sample) if line not in masked(said)]


# Page -> texts in the output of its commands
TUTORIALS = {
    "getting_started/your_text": [
        "Question: How do I write 8 3 1 1?",
        "bits/byte",
        "report.html",
    ],
    "getting_started/multi_node": [
        "2 x cpu",
        f"Resumed after step {20 if WHOLE else 4}",
        "world_size: 2 -> 1",
    ],
    "getting_started/hub_model": ["Starting from the weights in model", "from transformers import"],
    "reference/plugins": [
        "--inverse_root.warmup",
        "inverse_root.warmup: 10 -> 20 (affects training)",
        "2,5.",
    ],
    "reference/plugin_models": ["import"],
    "reference/plugin_optimizers": ["Finished after step 4"],
    "reference/plugin_hooks": ["Finished after step 4"],
}
LONG_TUTORIALS = (
    "getting_started/your_text",
    "getting_started/multi_node",
    "getting_started/hub_model",
    "reference/plugin_models",
)


def shorten(job: str) -> str:
    """Reduce the number of steps in the text of a job file."""
    job = re.sub(r"(?m)^(warmup_steps|freq) = \d+", r"\1 = 2", job)
    return re.sub(r"(?m)^steps = \d+", "steps = 4", job)


CASES = [
    pytest.param(name, marks=pytest.mark.long) if name in LONG_TUTORIALS else name
    for name in TUTORIALS
]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_commands_of_a_tutorial_print_the_documented_output(name: str, tmp_path):
    page = f"{name}.md"
    code_blocks = read_blocks(page)
    (tmp_path / "bin").mkdir()
    for program, options in (
        ("titanlite", f"{sys.executable} -m titanlite"),
        ("python", sys.executable),
    ):
        (tmp_path / "bin" / program).write_text(f'#!/bin/sh\nexec {options} "$@"\n')
        (tmp_path / "bin" / program).chmod(0o755)
    for _, title, text in code_blocks:
        if title:
            (tmp_path / title).write_text(text if WHOLE else shorten(text))
    commands = "".join(text for language, _, text in code_blocks if language == "bash")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"

    output = run(commands, tmp_path, PATH=path, MASTER_PORT=str(free_port()))

    assert [text for text in TUTORIALS[name] if text not in output] == []

    samples = read_samples(page)
    missing = []
    for sample in samples:
        missing += find_missing_lines(sample, output)
    # A model that was trained for a few steps cannot answer questions.
    learned = [] if WHOLE else ["Answer: eight thousand three hundred eleven."]
    assert missing == learned[: len(samples)]

    if name == "getting_started/multi_node":
        assert find_missing_lines(read_samples("guides/monitoring.md")[1], output) == []
    if name == "getting_started/your_text":
        assert (tmp_path / "my-model" / "config.json").exists()
        answer = output.partition("perplexity")[2]
        assert "eight thousand three hundred eleven" in answer or not WHOLE


def link_environment(clone: Path) -> None:
    """Use the installed packages of this repository in a clone.

    The stamp prevents ./run_train.sh from installing the package, which is found in PYTHONPATH.
    """
    (clone / ".venv").mkdir()
    for entry in (ROOT / ".venv").iterdir():
        if not entry.name.startswith("installed"):
            (clone / ".venv" / entry.name).symlink_to(entry)
    packages = (clone / "pyproject.toml").read_text() + (clone / "constraints.txt").read_text()
    checksum = subprocess.check_output(["cksum"], input=packages, text=True)
    (clone / ".venv" / "installed.").write_text(f"{checksum.strip()} {clone}\n")


def read_readme_commands() -> list[str]:
    """Return the shell commands of the README, without comments."""
    shell_code = "".join(re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL))
    commands = []
    for line in shell_code.replace("\\\n", " ").splitlines():
        command = line.split("  #")[0].strip()
        if command and not command.startswith("#"):
            commands.append(command)
    return commands


@pytest.mark.slow
def test_every_command_of_the_readme_works_in_a_fresh_clone(tmp_path):
    """The clone contains a job file and text, and a local hub serves the datasets in README."""
    clone = copy_repository(tmp_path / "titanlite")
    job_file = README.partition("```toml\n")[2].partition("```")[0]
    (clone / "my_job.toml").write_text(job_file)
    (clone / "data").mkdir()
    source_files = ROOT.glob("titanlite/**/*.py")
    texts = [json.dumps({"text": path.read_text()}) for path in source_files]
    (clone / "data" / "a.jsonl").write_text("\n".join(texts))
    link_environment(clone)
    model = {"tokenizer.json": (ROOT / "assets/tokenizer/tokenizer.json").read_bytes()}
    data = {"data/train-0.parquet": b"text"}
    commands = read_readme_commands()
    with Hub(
        {"models/openai-community/gpt2": model, "datasets/roneneldan/TinyStories": data}
    ) as hub:
        keys = {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
            "PYTHONPATH": str(clone),
        }
        for command in commands:
            # With --inspect, TensorBoard lists the curves instead of serving them.
            if "tensorboard" in command:
                assert "train/loss" in run(f"{command} --inspect", clone, **keys)
            elif "run_train.sh" in command and "--help" not in command:
                assert re.search(r"step +4/4|Nothing to do", run(command + SHORT, clone, **keys))
            elif command != "./run_tests.sh" and not command.startswith(("git clone", "cd ")):
                output = run(command, clone, **keys)
                if "watch" in command:
                    sample = read_samples("guides/monitoring.md")[0]
                    assert find_missing_lines(sample, output) == []
                prompts = re.findall(r"--prompt '([^']*)'", command)
                assert all(prompt in output for prompt in prompts)

    assert sum("run_train.sh" in command for command in commands) >= 2


def read_numbers(line: str) -> list[float]:
    """Return all numbers with a decimal point."""
    return [float(number) for number in re.findall(r"\d+\.\d+", line)]


def lines_with_numbers(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if read_numbers(line)]


def test_the_documented_plan_is_up_to_date():
    """Numbers may differ by 10%, because versions of torch run different kernels."""
    page = (ROOT / "docs/guides/memory_and_speed.md").read_text()
    command = page.partition("```bash")[2].partition("```")[0].strip()
    output = run(f"{PYTHON} -m {command}", ROOT)
    shown = read_samples("guides/memory_and_speed.md")[0]

    assert find_missing_lines(shown, output) == []

    # Warnings of libraries come last.
    lines = zip(lines_with_numbers(shown), lines_with_numbers(output), strict=False)
    for documented, printed in lines:
        expected = pytest.approx(read_numbers(printed), rel=0.1, abs=0.02)
        assert read_numbers(documented) == expected, (documented, printed)


def test_the_documented_migration_is_up_to_date(tmp_path):
    (tmp_path / "llama3_8b.toml").write_text(OF_02)
    output = run(f"{PYTHON} -m titanlite migrate llama3_8b.toml --out my_8b.toml", tmp_path)

    assert find_missing_lines(read_samples("reference/from_torchtitan.md")[0], output) == []


def test_no_page_outside_of_internals_is_too_long():
    """Generated pages, such as the reference of options, are not files in docs/."""
    pages = [page for page in ROOT.glob("docs/**/*.md") if page.parent.name != "internals"]
    num_words = {page.name: len(page.read_text().split()) for page in pages}

    assert len(pages) > 30
    assert [(name, num) for name, num in num_words.items() if num > MAX_PAGE_WORDS] == []


def test_no_page_installs_titanlite_from_pypi():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("titanlite/**/*.py")]
    assert [page for page in pages if re.search(r"pip install '?titanlite", page.read_text())] == []


def test_the_readme_names_files_that_exist():
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link


PAGES_WITH_PROGRAMS = sorted(page for page, programs in PROGRAMS.items() if programs)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_WITH_PROGRAMS, ids=lambda page: page.name)
def test_documented_python_programs_run(page: Path, tmp_path):
    """All code blocks of a page form one program, which runs in an empty folder."""
    (tmp_path / "program.py").write_text("\n".join(PROGRAMS[page]))
    output = run(f"{PYTHON} program.py", tmp_path)
    # An exception in a thread prints a traceback, but does not change the exit code.
    assert "Traceback" not in output


def test_documented_signatures_match_the_functions():
    documented = next(
        text for language, _, text in read_blocks("reference/python.md") if language == "text"
    ).splitlines()
    for line in documented:
        function = pkgutil.resolve_name(line.partition("(")[0])
        signature = inspect.signature(function)
        names_only = []
        for parameter in signature.parameters.values():
            names_only.append(parameter.replace(annotation=parameter.empty))
        plain = signature.replace(parameters=names_only, return_annotation=signature.empty)
        assert line == f"{function.__module__}.{function.__name__}{plain}"


def test_the_reference_has_every_key_with_its_type_default_and_text():
    escaped_page = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))["keys_page"]()
    # The page escapes special characters of Markdown, such as the underscores of keys.
    page = re.sub(r"\\([\\*_\[\]])", r"\1", escaped_page)
    for key, field in list_keys().items():
        assert f"### {key} {{ #{key} }}" in page
        assert (field.description or "").split("`")[0].replace("<", "&lt;") in page

    assert (
        "### training.seq_len { #training.seq_len }\n\n*an integer greater than 0; default `"
        in page
    )
    # This key is part of a table within a section.
    assert "### dataset.sources.weight" in page


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="pip install 'titanlite[docs]'"
)
def test_the_site_builds_without_warnings_and_loads_nothing_from_the_network(
    tmp_path,
):
    build = f"{PYTHON} -m mkdocs build --strict --site-dir {shlex.quote(str(tmp_path))}"
    assert "WARNING" not in run(build, ROOT, NO_MKDOCS_2_WARNING="1")

    written = {path.relative_to(tmp_path).with_suffix(".md") for path in tmp_path.rglob("*.html")}
    assert {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")} <= written

    commands = (tmp_path / "reference" / "commands.html").read_text()
    assert all(f'id="{name}"' in commands for name in COMMANDS)
    assert "--max-new-tokens" in commands

    asks = r'<(script|img|iframe)[^>]* src="(https?:)?//'
    asks += r'|<link[^>]* rel="(stylesheet|preconnect)"[^>]* href="(https?:)?//'
    for page in tmp_path.rglob("*.html"):
        assert not re.search(asks, page.read_text()), page

    # A page that is opened as a file cannot fetch JSON or start a worker, which the search needs.
    assert (tmp_path / "search" / "search_index.js").exists()
    assert "iframe-worker.js" in (tmp_path / "index.html").read_text()
